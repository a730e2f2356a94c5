"""Slash commands about the engine: settings, model, drafter, figures, the comparison with lane plain."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from mlx_spec.apps.cli.commands import command
from mlx_spec.apps.cli.options import known_models, methods, words_for
from mlx_spec.apps.config import KEYS, shown
from mlx_spec.errors import MlxSpecError, OptionError

# What may change inside a chat; the rest is decided when a model is loaded.
SETTABLE = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "width", "draft_window", "exactness",
            "fallback", "think", "show_thinking", "markdown", "stats")  # fmt: skip


def _set_words(chat: Any, before: list[str]) -> tuple[str, ...]:
    if not before:
        return SETTABLE
    key = KEYS.get(before[0])
    if key is None or len(before) > 1:
        return ()
    return (*words_for(key), "default")


@command("set", "[setting [value]]", words=_set_words)
def _set(chat: Any, rest: str) -> None:
    """Show or change settings; the value "default" takes one back."""
    name, _, value = rest.partition(" ")
    if name and name not in SETTABLE:
        raise OptionError(f"/set knows {', '.join(SETTABLE)}, not {name!r}")
    if value.strip():
        chat.talk.set(name, value.strip())
        for note in chat.talk.opened.switch_note(chat.talk.values["think"]) if name == "think" else ():
            chat.screen.note(note)
    for each in (name,) if name else SETTABLE:
        chat.screen.say(f"{each} = {shown(chat.talk.values[each])}")


@command("show", "[info|params|system|template|draft]", words=("info", "params", "system", "template", "draft"))
def _show(chat: Any, rest: str) -> None:
    """Show the model, the settings, the system prompt, the chat template or the drafter."""
    topics = {
        "info": _info, "params": lambda chat: _set(chat, ""), "draft": _draft_line,
        "system": lambda chat: chat.screen.say(f"system: {chat.talk.system or '(none)'}"),
        "template": lambda chat: chat.screen.say(str(chat.talk.engine.tokenizer.chat_template or "(none)")),
    }  # fmt: skip
    if rest and rest not in topics:
        raise OptionError(f"/show knows {', '.join(topics)}, not {rest!r}")
    topics[rest or "info"](chat)


def _info(chat: Any) -> None:
    engine = chat.talk.engine
    target = engine.target
    chat.screen.say(
        f"model {chat.talk.opened.name} · {engine.config.get('model_type', '?')} · {target.num_layers} layers · "
        f"hidden size {target.hidden_size} · vocabulary {target.vocab_size} · "
        f"context {target.max_context or 'not stated'}"
    )
    _draft_line(chat)


def _draft_line(chat: Any) -> None:
    engine = chat.talk.engine
    more = ""
    if engine.drafter is not None:
        more = f" · width {engine.drafter.default_width} by default, {engine.drafter.max_width or 'any'} at most"
    chat.screen.say(f"lane {engine.lane} ({engine.reason}){more}")


@command("model", "[name]", words=lambda chat, before: () if before else known_models())
def _model(chat: Any, rest: str) -> None:
    """Show the model, or go on with another one; the conversation stays."""
    from mlx_spec.apps.cli.opening import open_engine
    from mlx_spec.options import SpeculativeConfig

    if not rest:
        _info(chat)
        return
    talk, former = chat.talk, chat.talk.opened
    try:
        with chat.interrupts.raising():
            opened = open_engine(chat.settings, SpeculativeConfig(), chat.screen, chat.yes, rest, talk.release)
    except (MlxSpecError, KeyboardInterrupt) as error:
        if talk.opened is None:  # memory for two may not be there, so the former model had to go first
            talk.switch(open_engine(chat.settings, former.config, chat.screen, chat.yes, former.name))
        if isinstance(error, MlxSpecError):
            raise
        chat.screen.say("stopped")
    else:
        talk.switch(opened)
    _info(chat)


@command("draft", "[auto|off|method|name]", words=lambda chat, before: () if before else ("auto", "off", *methods()))
def _draft(chat: Any, rest: str) -> None:
    """Show the drafter, or go on with another one."""
    from mlx_spec.apps.cli.opening import Asking, bring_drafter

    if rest:
        try:
            with chat.interrupts.raising(), chat.screen.working(f"loading {rest}") as working:
                if rest not in ("auto", "off", "none"):
                    bring_drafter(rest, Asking(chat.screen, chat.yes).within(working), working.report)
                chat.talk.redraft(rest)
        except KeyboardInterrupt:
            chat.screen.say("stopped")
    _draft_line(chat)


@command("stats")
def _stats(chat: Any, rest: str) -> None:
    """Figures of the last answer, its accepted drafts per round, and the sums of this chat."""
    if not chat.answers:
        raise OptionError("there is no answer yet")
    last = chat.answers[-1]
    chat.screen.say(chat.screen.fold(chat.figures()))
    counts = Counter(last.stats.accepted_per_round)
    chat.screen.say("accepted per round: " + ", ".join(f"{n}: {counts[n]}x" for n in sorted(counts)))
    every = [answer.stats for answer in chat.answers]
    tokens, rounds = sum(s.committed for s in every), sum(s.rounds for s in every)
    seconds = sum(s.generated_s for s in every)
    chat.screen.say(
        f"this chat: {len(every)} answers · {tokens} tok · {tokens / seconds if seconds else 0:.1f} tok/s · "
        f"acceptance length {tokens / rounds if rounds else 0:.2f}"
    )


@command("compare")
def _compare(chat: Any, rest: str) -> None:
    """Run the last prompt on lane plain and on the lane in use, one after the other: speeds, and whether the tokens
    are the same."""
    talk = chat.talk
    if talk.last_prompt is None:
        raise OptionError("there is no prompt to compare on; say something first")
    if talk.engine.drafter is None:
        raise OptionError(f"lane plain is in use ({talk.engine.reason}); /draft chooses a drafter")
    prompt, options = talk.last_prompt, talk.options()
    if options.seed is None:
        options = replace(options, seed=chat.answers[-1].stats.seed)
    runs = []
    with chat.interrupts.watching():
        for drafting in (False, True):
            ids, stats = _one_run(chat, prompt, options, drafting)
            if chat.interrupts.stopped:
                chat.screen.say("stopped")
                return
            runs.append((ids, stats))
            chat.screen.say(
                f"lane {stats.lane}: {stats.committed} tok · {stats.generation_tps:.1f} tok/s · "
                f"acceptance length {stats.acceptance_length:.2f} · {stats.rounds} rounds"
            )
    (plain, plain_stats), (drafted, drafted_stats) = runs
    talk.plain_tps = plain_stats.generation_tps
    ratio = drafted_stats.generation_tps / talk.plain_tps if talk.plain_tps else 0.0
    chat.screen.say(f"{ratio:.2f}x vs plain · same tokens: {difference(plain, drafted)}")


def _one_run(chat: Any, prompt: list[int], options: Any, drafting: bool) -> tuple[list[int], Any]:
    """From cold, so that both runs do the same work."""
    engine = chat.talk.engine
    ids: list[int] = []
    stats: Any = None
    session = engine.session() if drafting else engine.session(drafting=False)
    with chat.screen.working("lane plain" if not drafting else f"lane {engine.lane}"):
        for response in engine.stream(prompt, options, session=session, cancel=chat.interrupts.cancelled):
            stats = response.stats
            if response.finish_reason != "cancel":
                ids.append(response.token)
    return ids, stats


def difference(one: list[int], other: list[int]) -> str:
    """Are two lists of tokens the same: yes, or where they part."""
    if one == other:
        return "yes"
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"no (first difference at {at})"


@command("trace", "on|off", words=("on", "off"))
def _trace(chat: Any, rest: str) -> None:
    """Show accepted drafts in green, on the raw text."""
    if rest not in ("on", "off"):
        raise OptionError(f"/trace takes on or off, not {rest!r}")
    chat.trace = rest == "on"
    if chat.trace and not chat.screen.out_color:
        chat.screen.note("this terminal shows no colours, so nothing will be marked")
    chat.screen.say(f"trace {rest}")


@command("tokens")
def _tokens(chat: Any, rest: str) -> None:
    """How many tokens the conversation takes, of how many the model can hold."""
    talk = chat.talk
    used = len(talk.prompt()) if talk.messages or talk.system else 0
    context = talk.engine.target.max_context
    chat.screen.say(f"{used} tokens" + (f" of {context} ({used / context:.0%})" if context else ""))
