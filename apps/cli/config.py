"""``mlx-spec config``: see and change the settings file."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from mlx_spec.apps.cli.options import words_for
from mlx_spec.apps.config import KEYS, config_path, key_named, resolve, shown, write_key


def _names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(key.name, help=key.help) for key in KEYS.values() if key.name.startswith(incomplete)]


def _values(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    key = KEYS.get(ctx.params.get("key") or "")
    words = words_for(key) if key is not None else ()
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


@click.group()
def config() -> None:
    """See and change settings.

    A flag wins over the environment (MLX_SPEC_<KEY>), that over the file, that over the default.
    """


@config.command()
def path() -> None:
    """Print where the settings file is (or would be)."""
    click.echo(config_path())


@config.command()
@click.argument("key", shell_complete=_names)
def get(key: str) -> None:
    """Print the value in force of one setting."""
    key_named(key)
    click.echo(shown(resolve()[key]))


@config.command("set", context_settings={"ignore_unknown_options": True})
@click.argument("key", shell_complete=_names)
@click.argument("value", shell_complete=_values)
def set_(key: str, value: str) -> None:
    """Set KEY to VALUE in the settings file; comments there are kept."""
    value = write_key(config_path(), key, value)
    click.echo(f"{key} = {shown(value)}  ({config_path()})")
    if resolve().source(key) == "environment":
        click.echo(f"note: the environment's {KEYS[key].env} wins over it", err=True)


@config.command()
@click.argument("key", shell_complete=_names)
def unset(key: str) -> None:
    """Remove KEY from the settings file, so that its default holds."""
    write_key(config_path(), key, None)
    click.echo(f"{key} = {shown(resolve()[key])}" if key in KEYS else f"{key} is removed")


@config.command("list")
def list_() -> None:
    """Print all settings: value, where it comes from, what it is."""
    settings = resolve()
    width = max(map(len, KEYS))
    for key in KEYS.values():
        click.echo(f"{key.name:<{width}}  {shown(settings[key.name]):<8}  {settings.source(key.name):<11}  {key.help}")
