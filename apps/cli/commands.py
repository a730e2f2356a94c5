"""The chat's slash commands: how one is found, described and completed. The commands are in ``slash_*.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mlx_spec.errors import MlxSpecError, OptionError

Run = Callable[[Any, str], bool | None]  # (chat, the rest of the line) -> True to leave the chat
Words = Callable[[Any, list[str]], Any]  # (chat, words before) -> words that may come next, or editor.PATHS


@dataclass(frozen=True)
class Command:
    names: tuple[str, ...]  # the first is the one that /help shows first
    args: str
    help: str
    run: Run
    words: Words


ALL: dict[str, Command] = {}
KEYS = (
    'Enter sends, Alt-Enter or Ctrl-J breaks the line, """ opens and closes a block, Ctrl-G opens $EDITOR, Tab '
    "completes, Ctrl-C stops an answer, Ctrl-Z suspends, Ctrl-D leaves."
)


def command(names: str, args: str = "", words: Iterable[str] | Words = ()) -> Callable[[Run], Run]:
    """Register the function below under these names; its docstring is the help."""

    def register(run: Run) -> Run:
        follow: Words = words if callable(words) else lambda chat, before, fixed=tuple(words): () if before else fixed
        found = Command(tuple(names.split()), args, " ".join((run.__doc__ or "").split()), run, follow)
        ALL.update(dict.fromkeys(found.names, found))
        return run

    return register


def run(chat: Any, line: str) -> bool | None:
    """Run one line that begins with a slash."""
    name, _, rest = line[1:].strip().partition(" ")
    if name not in ALL:
        raise OptionError(f"there is no command /{name}; /help lists them (a space before the slash sends it as text)")
    return ALL[name].run(chat, rest.strip())


def words(chat: Any, name: str, before: list[str]) -> Any:
    """What may follow ``/name before...``; nothing where that cannot be found out."""
    try:
        return ALL[name].words(chat, before) if name in ALL else ()
    except MlxSpecError:
        return ()


@command("help ?", "[command]", words=lambda chat, before: () if before else tuple(ALL))
def _help(chat: Any, rest: str) -> None:
    """List the commands, or describe one."""
    wanted = rest.lstrip("/")
    if wanted and wanted not in ALL:
        raise OptionError(f"there is no command /{wanted}; /help lists them")
    found = [ALL[wanted]] if wanted else list({id(item): item for item in ALL.values()}.values())
    heads = [" ".join(f"/{name}" for name in item.names) + (f" {item.args}" if item.args else "") for item in found]
    width = min(max(map(len, heads)), 34)
    lines = [
        chat.screen.fold(f"{head:<{width}}  {item.help}", width + 2) for head, item in zip(heads, found, strict=True)
    ]
    if not wanted:
        lines.append(chat.screen.fold(KEYS))
    chat.screen.say("\n".join(lines))


@command("exit quit bye")
def _exit(chat: Any, rest: str) -> bool:
    """Leave the chat."""
    return True


from mlx_spec.apps.cli import slash_engine, slash_talk  # noqa: E402, F401  (they register themselves)
