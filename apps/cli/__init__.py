"""The command line: finds commands by file name and turns every failure into one line and an exit code.

A module of this package that defines a click command of its own name is a command. This is the outermost boundary;
nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import errno
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

import click

from mlx_spec import errors

OK, RUNTIME, USAGE, NOT_FOUND, RESOURCES, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 4, 130, 141


class Commands(click.Group):
    """Commands by file name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = sorted(module.name for module in pkgutil.iter_modules(__path__))
        return [name for name in names if self.get_command(ctx, name) is not None]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in {module.name for module in pkgutil.iter_modules(__path__)}:
            return None
        command = getattr(importlib.import_module(f"{__name__}.{name}"), name, None)
        return command if isinstance(command, click.Command) else None

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            raise click.UsageError(f"no such command {name!r}; known are {', '.join(self.list_commands(ctx))}", ctx)
        return super().resolve_command(ctx, args)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("mlx-spec"), prog_name="mlx-spec")
def cli() -> None:
    """Lossless speculative decoding for MLX: a drafter guesses ahead, the model decides every token.

    \b
      mlx-spec chat                          talk to a model
      echo "Why is the sky blue?" | mlx-spec generate
      mlx-spec models list                   what is here, what fits
    """


def exit_code(error: BaseException) -> int:
    """The exit code of a failure: 1 runtime, 2 usage, 3 model not found, 4 memory or disk, 130 interrupted."""
    if isinstance(error, (click.exceptions.Abort, KeyboardInterrupt)):
        return INTERRUPTED
    if isinstance(error, (click.UsageError, errors.OptionError)):
        return USAGE
    if isinstance(error, errors.ModelNotFoundError):
        return NOT_FOUND
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
    # MLX reports an allocation that failed as a RuntimeError whose text begins so.
    starved = isinstance(error, RuntimeError) and str(error).startswith(("[malloc", "[metal::malloc"))
    if full or starved or isinstance(error, (errors.ResourceError, MemoryError)):
        return RESOURCES
    return RUNTIME


def sentence(error: BaseException) -> str:
    """What the user reads: one line, with the next step where the error has none of its own."""
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "mlx-spec"
        text = f"{error.format_message().rstrip('.')} (see {where} --help)"
    elif isinstance(error, click.ClickException):
        text = error.format_message()
    elif isinstance(error, errors.MlxSpecError):
        text = str(error)
    elif isinstance(error, OSError):
        text = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    else:
        text = f"{type(error).__name__}: {error} (a fault of mlx-spec; --debug shows where)"
    return " ".join(text.split())


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if args is None else args)
    _streams()
    try:
        code = cli.main(words, prog_name="mlx-spec", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _closed()
    except Exception as error:
        if "--debug" in words or os.environ.get("MLX_SPEC_DEBUG"):
            traceback.print_exc()
        code = exit_code(error)
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            print(error.format_message(), file=sys.stderr)
        elif code != INTERRUPTED:
            print(f"error: {sentence(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        code = INTERRUPTED
    return code if isinstance(code, int) else OK


def _streams() -> None:
    """Three streams that can be used, whatever the shell closed; a letter that the terminal lacks becomes ``?``."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (stays open)
        elif name != "stdin" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _closed() -> int:
    """The reader of our output has gone (``| head``): nothing to say, and nobody to say it to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def main() -> None:
    sys.exit(run())
