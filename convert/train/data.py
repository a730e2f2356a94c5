"""``make_data``: prompts in, sequences of the target's own answers out, shard by shard. A killed run goes on where its
last whole shard ended, and ends with the same files.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from mlx_spec import targets
from mlx_spec.convert.train import shards
from mlx_spec.convert.train.answers import answer
from mlx_spec.convert.train.prompts import Prompt, Source, read_prompts
from mlx_spec.convert.train.provenance import versions
from mlx_spec.convert.train.settings import DataSettings
from mlx_spec.convert.train.shards import Sample
from mlx_spec.convert.train.storage import fingerprint, new_folder
from mlx_spec.convert.train.trouble import TrainingError
from mlx_spec.errors import OptionError, UnsupportedError
from mlx_spec.targets.loading import find_target, load_target
from mlx_spec.text import encode_chat, encode_prompt


@dataclass(frozen=True)
class DataProgress:
    """How far ``make_data`` is."""

    prompts: int
    of: int
    tokens: int  # of answers, in this run
    seconds: float  # of this run, model loading left out

    @property
    def line(self) -> str:
        speed = self.tokens / self.seconds if self.seconds else 0.0
        return f"answering: {self.prompts} of {self.of} prompts, {self.tokens} tokens, {speed:.0f} tokens/s"


def make_data(
    settings: DataSettings,
    resume: bool = False,
    template: Mapping[str, Any] | None = None,
    cancel: Callable[[], bool] = lambda: False,
    report: Callable[[DataProgress], None] = lambda progress: None,
    command: str = "",
) -> dict[str, Any]:
    """Let the target answer all prompts; returns the manifest (``complete`` False where ``cancel`` ended it).

    ``template``: keyword arguments of the chat template that belong to this target. Raises OptionError (no prompts, a
    folder in use, ``resume`` with other settings), TrainingError (nothing but one-token answers), and what loading
    a target raises.
    """
    out = Path(settings.out).expanduser()
    if resume:
        shards.read_manifest(out)
    folder = find_target(settings.target).path
    model, tokenizer, config = load_target(folder)
    target = targets.wrap(model, config)  # refuses here what no drafter can serve
    kwargs = {} if settings.raw else switches(settings.think, template or {})
    prompts, sources = read_prompts(settings, lambda text: _plain_ids(tokenizer, text))
    kept, left_out = _encoded(prompts, tokenizer, settings, kwargs)
    limit = _room(target.max_context, settings)
    manifest = _manifest(settings, tokenizer, kwargs, folder, target.vocab_size, sources, command)
    manifest |= {"prompts": len(kept), "left_out": left_out}
    if resume:
        manifest = _same(shards.read_manifest(out), manifest, out)
    else:
        new_folder(out, "training data", shards.MANIFEST)
        shards.write_manifest(out, manifest)
    ends = sorted(tokenizer.eos_token_ids)
    began, made = time.perf_counter(), 0
    for number in range(len(manifest["shards"]), -(-len(kept) // settings.shard)):
        part = kept[number * settings.shard : (number + 1) * settings.shard]
        done = number * settings.shard

        def told(tokens: int, done: int = done, made: int = made) -> None:
            report(DataProgress(done, len(kept), made + tokens, time.perf_counter() - began))

        answers = answer(
            model, part, ends, limit, settings.batch, settings.temperature, settings.top_p,
            seed=settings.seed * 1_000_003 + number, cancel=cancel, told=told,
        )  # fmt: skip
        if answers is None:
            return manifest
        made += sum(map(len, answers))
        _keep(out, manifest, number, part, answers, target.vocab_size)
        report(DataProgress(done + len(part), len(kept), made, time.perf_counter() - began))
    _finish(out, manifest)
    return manifest


def switches(think: str, template: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template's keyword arguments under the thinking switch."""
    return dict(template) if think == "auto" else dict(template) | {"enable_thinking": think == "on"}


def thinking(tokenizer: Any, kwargs: Mapping[str, Any]) -> str:
    """The state of the template's thinking switch: "on", "off", or "" where it has none."""
    if not tokenizer.has_thinking and "thinking" not in str(tokenizer.chat_template):
        return ""
    return "on" if kwargs.get("enable_thinking", tokenizer.has_thinking) else "off"


def _encoded(
    prompts: list[Prompt], tokenizer: Any, settings: DataSettings, kwargs: Mapping[str, Any]
) -> tuple[list[list[int]], dict[str, int]]:
    """(ids of each usable prompt, how many were left out and why)."""
    if not settings.raw and not tokenizer.has_chat_template:
        raise UnsupportedError("this model has no chat template; give --raw to continue the texts as they are")
    kept, long, opening = [], 0, encode_prompt(tokenizer, "")
    for prompt in prompts:
        try:
            if prompt.ids:
                ids = [*opening, *prompt.ids]
            elif settings.raw:
                ids = encode_prompt(tokenizer, prompt.text)
            else:
                ids = encode_chat(tokenizer, prompt.messages, **kwargs)
        except TemplateError as error:
            raise OptionError(f"this model's chat template refuses a prompt: {error}") from error
        if len(ids) > settings.max_prompt:
            long += 1
        elif ids:
            kept.append(ids)
    if not kept:
        raise OptionError(f"all {long} prompts are longer than --max-prompt {settings.max_prompt} tokens; raise it")
    return kept, {"long_prompts": long, "one_token_answers": 0}


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Without special tokens, and without transformers' warning that a file is longer than the context."""
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _room(context: int | None, settings: DataSettings) -> int:
    if context is not None and settings.max_prompt + settings.max_tokens > context:
        raise OptionError(
            f"--max-prompt {settings.max_prompt} and --max-tokens {settings.max_tokens} do not fit together into this "
            f"model's context of {context}; lower one"
        )
    return settings.max_tokens


def _manifest(
    settings: DataSettings,
    tokenizer: Any,
    kwargs: Mapping[str, Any],
    folder: Path,
    vocab: int,
    sources: list[Source],
    command: str,
) -> dict[str, Any]:
    template = "" if settings.raw else str(tokenizer.chat_template)
    return {
        "format": shards.FORMAT,
        "target": settings.target,
        "target_fingerprint": fingerprint(folder),
        "vocab_size": vocab,
        "eos_token_ids": sorted(tokenizer.eos_token_ids),
        "template_sha256": hashlib.sha256(template.encode()).hexdigest() if template else None,
        "template_kwargs": dict(kwargs),
        "thinking": "" if settings.raw else thinking(tokenizer, kwargs),
        "settings": settings.as_dict(),
        "sources": [asdict(source) for source in sources],
        "command": command,
        "versions": versions(),
        "shards": [],
        "complete": False,
    }


# What must be the same for a run to go on; paths, the command and versions may differ.
SAME = ("format", "target_fingerprint", "vocab_size", "template_sha256", "template_kwargs", "prompts")
FREE = ("out", "target", "prompts")


def _same(found: dict[str, Any], wanted: dict[str, Any], out: Path) -> dict[str, Any]:
    """The manifest to go on with. Raises OptionError naming the first thing that is not as it was."""
    pairs = [(name, found.get(name), wanted.get(name)) for name in SAME]
    pairs += [(n, found["settings"].get(n), v) for n, v in wanted["settings"].items() if n not in FREE]
    pairs += [("the prompts' files", [s["sha256"] for s in found["sources"]], [s["sha256"] for s in wanted["sources"]])]
    for name, was, now in pairs:
        if was != now:
            short = [json.dumps(value)[:60] for value in (was, now)]
            raise OptionError(f"{out} was begun with another {name} ({short[0]}, now {short[1]}); name another folder")
    return found


def _keep(
    out: Path, manifest: dict[str, Any], number: int, part: list[list[int]], answers: list[list[int]], vocab: int
) -> None:
    """Write one shard and the manifest that lists it."""
    pairs = list(zip(part, answers, strict=True))
    samples = [Sample(np.array([*p, *a], dtype=np.int32), len(p)) for p, a in pairs if len(a) >= 2]
    manifest["left_out"]["one_token_answers"] += len(pairs) - len(samples)
    manifest["shards"].append(shards.write_shard(out, number, samples, vocab))
    shards.write_manifest(out, manifest)


def _finish(out: Path, manifest: dict[str, Any]) -> None:
    if not any(entry["sequences"] for entry in manifest["shards"]):
        for name in (shards.MANIFEST, *(entry["file"] for entry in manifest["shards"])):
            (out / name).unlink()
        with suppress(OSError):  # somebody put a file beside ours
            out.rmdir()
        raise TrainingError(
            f"every one of the {manifest['left_out']['one_token_answers']} answers is a single token, from which "
            "nothing can be learned; check the prompts and the chat template"
        )
    manifest["complete"] = True
    shards.write_manifest(out, manifest)
