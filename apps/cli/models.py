"""``mlx-spec models``: what is here, what fits; pull and remove."""

from __future__ import annotations

import json
import sys

import click
from click.shell_completion import CompletionItem

from mlx_spec.apps.cli.output import Screen
from mlx_spec.errors import OptionError


def _known(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from mlx_spec.apps import models

    return [CompletionItem(name) for name in models.names() if name.startswith(incomplete)]


def _pulled(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from mlx_spec.apps import models

    return [CompletionItem(name) for name in models.pulled() if name.startswith(incomplete)]


@click.group()
def models() -> None:
    """See which models there are, pull them, remove them."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
def list_(as_json: bool) -> None:
    """List the short names and what was pulled."""
    from mlx_spec.apps import models as known

    rows = known.rows()
    if as_json:
        click.echo(json.dumps(known.as_dicts(rows), indent=2))
        return
    cells = [("NAME", "WHAT", "SIZE", "HERE", "FITS", "DRAFTER", "STATE")]
    for row in rows:
        fits = {True: "yes", False: "no", None: "-"}[row.fits]
        here = "yes" if row.here else "no"
        cells.append((row.name, row.what, f"{row.size_gb:.2f} GB", here, fits, row.drafter, row.state))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


@models.command()
@click.argument("name", shell_complete=_known)
@click.option("-y", "--yes", is_flag=True, help="Download without asking.")
@click.option("--debug", is_flag=True, help="Show where an error comes from.")
def pull(name: str, yes: bool, debug: bool) -> None:
    """Bring NAME (a name from the list, or a hub id) and its drafter to this machine."""
    from mlx_spec.apps import models as known
    from mlx_spec.apps.cli.opening import Asking

    screen = Screen()
    with screen.working(f"looking for {name}") as working:
        paths = known.ensure(name, ask=Asking(screen, yes).within(working), progress=working.report)
    click.echo(f"{name} is here: {paths.target}" + (f" with drafter {paths.draft.resolve()}" if paths.draft else ""))


@models.command()
@click.argument("name", shell_complete=_pulled)
@click.option("-y", "--yes", is_flag=True, help="Remove without asking.")
def rm(name: str, yes: bool) -> None:
    """Remove NAME, if it was pulled."""
    from mlx_spec.apps import models as known

    if name in known.pulled() and not yes:
        if not sys.stdin.isatty():
            raise OptionError(f"nobody can be asked whether to remove {name}; give --yes to agree")
        click.confirm(f"Remove {name}?", abort=True, err=True)
    freed = known.remove(name)
    click.echo(f"{name} is removed; {freed / 1e9:.2f} GB freed")
