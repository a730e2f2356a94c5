"""``mlx-spec train``: make data, train a drafter, write one out. Flags are the rows of the settings' tables."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

import click

from mlx_spec.apps.cli import options as flags_
from mlx_spec.apps.cli.output import Screen
from mlx_spec.convert.train.settings import BITS, DataSettings, Settings, TrainSettings, flag
from mlx_spec.errors import OptionError

F = TypeVar("F", bound=Callable[..., Any])


def _option(item: Field[Any]) -> Callable[[F], F]:
    name, kind, many = flag(item.name), item.metadata["kind"], item.metadata["many"]
    words = item.metadata["help"]
    if isinstance(item.default, (int, float, str)) and not isinstance(item.default, bool):
        words += f" [{item.default:g}]" if isinstance(item.default, float) else f" [{item.default}]"
    if kind is bool:
        return click.option(f"{name}/--no-{name[2:]}", item.name, default=None, help=words)
    shown = "[" + "|".join(item.metadata["choices"]) + "]" if item.metadata["choices"] else None
    if many and kind is int:
        return click.option(name, item.name, type=Numbers(), default=None, help=f"{words}; with commas between")
    return click.option(name, item.name, type=kind, default=None, multiple=many, metavar=shown, help=words)


class Numbers(click.ParamType):
    """Whole numbers with commas between."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            raise OptionError(f"--taps must be whole numbers with commas between, not {value!r}") from None


def _rows(table: type[Settings]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for item in reversed(fields(table)):
            command = _option(item)(command)
        return command

    return decorate


def _common(command: F) -> F:
    for option in (
        click.option("--debug", is_flag=True, help="Show where an error comes from."),
        click.option("-q", "--quiet", is_flag=True, help="Say nothing on stderr but errors."),
        click.option("-v", "--verbose", count=True, help="Say more on stderr."),
        click.option("-y", "--yes", is_flag=True, help="Download without asking."),
        flags_.setting("blas"),
        click.option(
            "--resume", "going_on", is_flag=True, help="Go on with the --out folder of a run that ended early."
        ),
        click.option("--recipe", metavar="FILE", help="TOML with these settings; flags win over it."),
    ):
        command = option(command)
    return command


@click.group()
def train() -> None:
    """Train a drafter for a model: first its answers, then the drafter.

    \b
      mlx-spec train data --target smollm2 --prompts questions.txt --prompts ~/my/project --out answers
      mlx-spec train run --target smollm2 --data answers --minutes 30 --out run
      mlx-spec chat --model smollm2 --draft run/drafter
    """


@train.command()
@_rows(DataSettings)
@_common
def data(recipe: str | None, going_on: bool, **flags: Any) -> None:
    """Let the model answer prompts; its answers are what a drafter learns from."""
    screen, given = _opened(flags)
    settings = DataSettings.make(recipe, given)
    template = _ready(settings.target, flags, screen)

    from mlx_spec.apps.cli.interrupts import Interrupts
    from mlx_spec.convert.train.data import make_data

    interrupts = Interrupts()
    with screen.working(f"loading {settings.target}") as working, interrupts.watching():
        manifest = make_data(
            settings, going_on, template, interrupts.cancelled, lambda p: working.report(p.line), _command()
        )
    count = sum(entry["sequences"] for entry in manifest["shards"])
    if not manifest["complete"]:
        screen.line(f"stopped; {count} sequences are kept in {settings.out}, --resume goes on")
        raise KeyboardInterrupt
    tokens = sum(entry["tokens"] for entry in manifest["shards"])
    left = ", ".join(f"{number} {what.replace('_', ' ')}" for what, number in manifest["left_out"].items() if number)
    click.echo(f"{settings.out}: {count} sequences, {tokens} tokens" + (f"; left out: {left}" if left else ""))


@train.command()
@_rows(TrainSettings)
@_common
def run(recipe: str | None, going_on: bool, **flags: Any) -> None:
    """Train a drafter on the model's answers. Ctrl-C saves; --resume goes on."""
    screen, given = _opened(flags)
    if going_on and not given.get("out") and not recipe:
        raise OptionError("--resume needs the --out folder of the run to go on with")
    settings = None if going_on else TrainSettings.make(recipe, given)
    out = str(given.get("out") or _from_recipe(recipe, "out"))
    start_from = settings.start_from if settings else None
    _ready(given.get("target") or (settings.target if settings else _recorded(out)), flags, screen, start_from)

    from mlx_spec.apps.cli.interrupts import Interrupts
    from mlx_spec.convert.train import curve
    from mlx_spec.convert.train.run import resume, train

    if not curve.can_plot():
        screen.note("matplotlib is not installed, so the curve is kept as JSON lines only (extra: plot)")
    interrupts = Interrupts()
    with screen.working("reading the data") as working, interrupts.watching():

        def report(progress: Any) -> None:
            screen.line(progress.note) if progress.note.startswith("note: ") else working.report(progress.line)

        if settings is None:
            result = resume(out, given, interrupts.cancelled, report)
        else:
            result = train(settings, interrupts.cancelled, report, _command())
    if not result.finished:
        screen.line(
            f"stopped at update {result.step} of {result.steps}; `mlx-spec train run --resume --out {out}` goes on"
        )
        raise KeyboardInterrupt
    length = "" if result.measured is None else f", held-out acceptance length {result.measured.acceptance_length:.2f}"
    click.echo(f"{result.drafter}: {result.step} updates{length}")


@train.command()
@click.argument("run_folder", metavar="RUN")
@click.argument("out")
@click.option("--step", type=int, help="The checkpoint of this update, not the newest.")
@click.option("--bits", type=int, help="Weights in 16 bits (bfloat16), 8 or 4.")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
def export(run_folder: str, out: str, step: int | None, bits: int | None, debug: bool) -> None:
    """Write the drafter of a checkpoint of RUN into the new folder OUT."""
    if bits not in (None, *BITS):
        raise OptionError(f"--bits must be 4, 8 or 16, not {bits}")
    from mlx_spec.convert.train.run import export as write

    click.echo(write(run_folder, out, step, bits))


def _opened(flags: dict[str, Any]) -> tuple[Screen, dict[str, Any]]:
    """The screen, and what was given of the settings' rows."""
    screen = Screen(flags_.verbosity(flags["verbose"], flags["quiet"]))
    names = {item.name for table in (DataSettings, TrainSettings) for item in fields(table)}
    given = {name: value for name, value in flags.items() if name in names and value not in (None, ())}
    return screen, given


def _ready(target: str, flags: Mapping[str, Any], screen: Screen, drafter: str | None = None) -> dict[str, Any]:
    """Choose a BLAS, then have the target and the drafter here; the target's template's keyword arguments."""
    from mlx_spec import blas
    from mlx_spec.apps import models
    from mlx_spec.apps.cli.opening import Asking, bring_drafter
    from mlx_spec.apps.config import resolve

    report = blas.prepare(resolve({"blas": flags.get("blas")})["blas"])
    if report.advice:
        screen.note(report.advice)
    screen.detail(f"blas {report.name}: {report.detail}")
    asking = Asking(screen, flags["yes"])
    with screen.working(f"looking for {target}") as working:
        paths = models.ensure(target, ask=asking.within(working), progress=working.report)
        bring_drafter(drafter, asking.within(working), working.report)
    return dict(paths.template_kwargs)


def _from_recipe(recipe: str | None, name: str) -> Any:
    from mlx_spec.convert.train.settings import read_recipe

    return read_recipe(recipe, "train").get(name, "") if recipe else ""


def _recorded(out: str) -> str:
    from pathlib import Path

    from mlx_spec.convert.train.records import read_record

    return str(read_record(Path(out).expanduser())["settings"]["target"])


def _command() -> str:
    return shlex.join(["mlx-spec", *sys.argv[1:]])


__all__ = ["train"]
