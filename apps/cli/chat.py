"""``mlx-spec chat``: the talk in the terminal. Reads lines, runs answers, hands commands on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mlx_spec.apps.cli import options as flags_
from mlx_spec.apps.cli import sentence
from mlx_spec.apps.cli.output import Screen
from mlx_spec.errors import MlxSpecError, ModelNotFoundError, OptionError

HINT = "Ctrl-D or /exit leaves (so does a second Ctrl-C now)."


@click.command()
@flags_.model_flags
@flags_.request_flags
@click.option("-c", "--continue", "continue_", is_flag=True, help="Go on with the last conversation.")
@flags_.setting("markdown")
@flags_.setting("history")
@flags_.common_flags
def chat(continue_: bool, **flags: Any) -> None:
    """Talk to a model.

    /help lists the commands. Piped text is one message: it is answered, then the chat ends.

    \b
      mlx-spec chat
      echo "What is the capital of France?" | mlx-spec chat
    """
    settings, config = flags_.settle(flags)
    screen = Screen(flags_.verbosity(flags["verbose"], flags["quiet"]))
    piped = None
    if not sys.stdin.isatty():
        from mlx_spec.apps.cli.generate import read_pipe

        piped = read_pipe(screen)
        if not piped.strip():
            raise OptionError("nothing was piped in; pipe a message, or run this in a terminal")
    for note in (*settings.notes, *flags_.unused(settings)):
        screen.note(note)

    store = _open_store() if continue_ or (settings["history"] and piped is None) else None
    kept = store.latest() if store is not None and continue_ else None
    if continue_ and kept is None:
        raise OptionError("there is no conversation to continue; start one with `mlx-spec chat`")
    named = kept.model if settings["model"] is None and kept is not None else ""

    from mlx_spec.apps.cli.opening import open_engine
    from mlx_spec.apps.cli.talk import Talk
    from mlx_spec.apps.cli.terminal import quiet

    with quiet():
        try:
            opened = open_engine(settings, config, screen, flags["yes"], named or None)
        except ModelNotFoundError as error:
            if not named:
                raise
            raise ModelNotFoundError(f"the last conversation's model: {error}; or give another with -m NAME") from error
        talk = Talk(opened, settings, store if settings["history"] else None, screen.note)
        for note in opened.switch_note(settings["think"]):
            screen.note(note)
        chat_ = Chat(talk, settings, screen, flags["yes"])
        if store is not None and kept is not None:
            talk.restore(store, kept.id)
            screen.line(f"continuing {kept.title!r}, {kept.count} messages", faint=True)
        if piped is not None:
            chat_.one(piped)
        else:
            with chat_.interrupts.watching():
                chat_.loop()


def _open_store() -> Any:
    from mlx_spec.apps.store import Store, StoreError

    try:
        return Store()
    except StoreError as error:
        raise StoreError(f"{error} (or chat with --no-history)") from error


class Chat:
    """The loop around a ``Talk``. Commands get this object."""

    def __init__(self, talk: Any, settings: Any, screen: Screen, yes: bool = False) -> None:
        from mlx_spec.apps.cli.interrupts import Interrupts

        self.talk = talk
        self.settings = settings
        self.screen = screen
        self.yes = yes
        self.trace = False
        self.interrupts = Interrupts()
        self.answers: list[Any] = []  # of this process, newest last

    def one(self, text: str) -> None:
        """One message and its answer; then the process ends."""
        self.say(text)
        if self.answers and self.answers[-1].stopped:
            raise KeyboardInterrupt

    def loop(self) -> None:
        """Until Ctrl-D, /exit, or Ctrl-C twice (KeyboardInterrupt)."""
        from mlx_spec.apps.cli.commands import ALL, run, words
        from mlx_spec.apps.cli.editor import CommandCompleter, Editor

        editor = Editor(
            self._history() if self.settings["history"] else None,
            CommandCompleter(ALL, lambda command, before: words(self, command, before)),
            self.screen.note,
        )
        self._greet()
        while True:
            try:
                text = editor.read()
            except KeyboardInterrupt:
                self.interrupts.press()
                self.screen.say(HINT)
                continue
            except EOFError:
                return
            self.interrupts.forget()
            try:
                if text.startswith("/"):
                    if run(self, text):
                        return
                elif text.strip():
                    self.say(text)
            except (MlxSpecError, OSError) as error:
                self.screen.say(f"error: {sentence(error)}")

    def say(self, text: str) -> None:
        """A message of the user, and its answer."""
        from mlx_spec.apps.store import Message

        before = list(self.talk.messages)
        self.talk.messages.append(Message("user", self.talk.compose(text)))
        attached, self.talk.attached = self.talk.attached, []
        try:
            self.answer(before)
        finally:
            if self.talk.messages is before:
                self.talk.attached = attached

    def answer(self, before: list[Any]) -> None:
        """Answer the last message. Where that fails, or is stopped before a word was said, the messages are again
        those of ``before``."""
        from mlx_spec.apps.store import Message

        talk = self.talk
        found = None
        try:
            found = self._run()
        finally:
            if found is None:
                talk.messages = before
        self.answers.append(found)
        for note in found.stats.notes:
            self.screen.note(note)
        if found.stopped and not found.tokens:
            talk.messages = before
            self.screen.say("stopped before the answer began; the conversation is as it was")
            return
        if found.stopped:
            self.screen.say("(stopped)")
        figures = {"timings": found.stats.timings(), "mlx_spec": found.stats.mlx_spec()}
        talk.messages.append(Message("assistant", found.text, found.thinking, found.stopped, figures))
        if talk.values["stats"]:
            self.screen.line(self.screen.fold(self.figures()), faint=True)
        talk.keep()

    def figures(self) -> str:
        """The line about the last answer."""
        from mlx_spec.apps.cli.figures import stats_line

        thinking = self.talk.opened.thinking(self.talk.values["think"])
        return stats_line(self.answers[-1], thinking, self.talk.plain_tps)

    def _run(self) -> Any:
        from mlx_spec.apps.cli.answers import run_answer
        from mlx_spec.apps.cli.generate import reading, seen_by
        from mlx_spec.apps.cli.thinking import ThinkingView

        talk = self.talk
        prompt, options = talk.prompt(), talk.options()
        with self.screen.working("reading the prompt") as working, self.interrupts.watching():
            found = run_answer(
                talk.engine, prompt, options, self._writer(),
                ThinkingView(self.screen, talk.values["show_thinking"]),
                session=talk.session, cancel=self.interrupts.cancelled,
                progress=reading(working), seen=seen_by(working),
            )  # fmt: skip
        talk.last_prompt = prompt
        return found

    def _writer(self) -> Any:
        from mlx_spec.apps.cli.answers import PlainWriter, TraceWriter

        if self.trace:
            return TraceWriter(self.screen.write, self.screen.paint)
        if self.talk.values["markdown"] and self.screen.out_color:
            from mlx_spec.apps.cli.markdown import MarkdownWriter

            return MarkdownWriter()
        return PlainWriter(self.screen.write)

    def _greet(self) -> None:
        engine = self.talk.engine
        reason = f" ({engine.reason})" if engine.reason else ""
        self.screen.banner(f"{self.talk.opened.name} · lane {engine.lane}{reason} · /help for commands, Ctrl-D leaves")

    @staticmethod
    def _history() -> Path:
        from platformdirs import user_data_path

        return user_data_path("mlx-spec", appauthor=False) / "history"


__all__ = ["Chat", "chat"]
