"""``mlx-spec completion``: shell completion, through click's own scripts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from mlx_spec.errors import OptionError

SHELLS = ("bash", "zsh", "fish")
# A zsh without settings, such as a new Mac's, has not loaded its completion.
START = {"zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }\n"}
_shell = click.argument("shell", type=click.Choice(SHELLS), required=False)


@click.group()
def completion() -> None:
    """Complete commands, options and model names with Tab."""


def script(shell: str) -> str:
    from mlx_spec.apps.cli import cli

    found = get_completion_class(shell)
    assert found is not None  # SHELLS are the ones that click has
    return found(cli, {}, "mlx-spec", "_MLX_SPEC_COMPLETE").source()


def _mine(shell: str | None) -> str:
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise OptionError(f"no completion for the shell {name or '(unknown)'!r}; give one of {', '.join(SHELLS)}")
    return name


@completion.command()
@_shell
def show(shell: str | None) -> None:
    """Print the completion script (SHELL: this shell unless given)."""
    click.echo(script(_mine(shell)))


@completion.command()
@_shell
def install(shell: str | None) -> None:
    """Write the script where the shell finds it (SHELL: this shell unless given)."""
    name = _mine(shell)
    from platformdirs import user_config_path, user_data_path

    if name == "fish":  # fish reads this folder by itself, on macOS too
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        target = Path(base) / "fish" / "completions" / "mlx-spec.fish"
    elif name == "bash" and sys.platform != "darwin":
        target = user_data_path("bash-completion", appauthor=False) / "completions" / "mlx-spec"
    else:
        target = user_config_path("mlx-spec", appauthor=False) / f"completion.{name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(START.get(name, "") + script(name) + "\n", encoding="utf-8")
    click.echo(f"wrote {target}")
    if target.name.startswith("completion."):
        _add_line(Path.home() / f".{name}rc", f'source "{target}"')


def _add_line(rc: Path, line: str) -> None:
    """Append ``line`` once."""
    text = rc.read_text(encoding="utf-8") if rc.exists() else ""
    line += "  # mlx-spec completion"
    if line in text.splitlines():
        click.echo(f"{rc} already reads it")
        return
    with rc.open("a", encoding="utf-8") as file:
        file.write(("" if not text or text.endswith("\n") else "\n") + line + "\n")
    click.echo(f"added a line to {rc}; it works in the next shell")
