"""Prompts from files: lines of text, JSONL chats, pieces of code. Needs a tokenizer only to cut raw code."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.convert.train.settings import DataSettings
from mlx_spec.convert.train.storage import hash_file
from mlx_spec.errors import OptionError

INSTRUCTIONS = (  # what a programmer asks about a piece of code
    "Explain what this code does.",
    "Continue this code.",
    "Write this code again with docstrings and comments.",
    "Write unit tests for this code.",
    "Rewrite this code with clearer names.",
    "Find mistakes in this code and show it corrected.",
)
SKIPPED = {".git", ".venv", "venv", "node_modules", "__pycache__", "build", "dist", ".mypy_cache", ".ruff_cache"}
MOST_BYTES = 400_000  # a code file larger than this was not written by hand
ROLES = ("system", "user", "assistant", "tool", "developer")

Messages = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Prompt:
    """Either a conversation that waits for an answer, or a text (or its ids) to be continued."""

    messages: Messages = ()
    text: str = ""
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """Where prompts came from, for the record."""

    path: str
    sha256: str  # of the file; of a folder: over its files' names and hashes
    prompts: int


def read_prompts(settings: DataSettings, encode: Callable[[str], list[int]]) -> tuple[list[Prompt], list[Source]]:
    """All prompts, each once, in an order drawn by the seed, at most ``limit``.

    ``encode`` gives the ids of a raw text. Raises OptionError for a source that is missing, empty or malformed (file
    and line are named).
    """
    prompts: dict[Prompt, None] = {}
    sources = []
    for name in settings.prompts:
        path = Path(name).expanduser()
        if not path.exists():
            raise OptionError(f"there are no prompts at {name}; give a file or a folder")
        found = list(_read(path, settings, encode))
        if not found:
            raise OptionError(f"{name} holds no prompt ({_wanted(path, settings)})")
        sources.append(Source(name, _hash(path, settings), len(found)))
        prompts |= dict.fromkeys(map(_frozen, found))
    kept = [_thawed(prompt) for prompt in prompts]
    random.Random(settings.seed).shuffle(kept)
    return kept[: settings.limit], sources


def _frozen(prompt: Prompt) -> Any:
    return json.dumps(prompt.messages, sort_keys=True), prompt.text, prompt.ids


def _thawed(key: Any) -> Prompt:
    return Prompt(tuple(json.loads(key[0])), key[1], key[2])


def _wanted(path: Path, settings: DataSettings) -> str:
    if path.is_dir():
        return f"files with suffix {', '.join(settings.code_suffixes)} are read"
    return "an object with messages or prompt a line" if path.suffix == ".jsonl" else "every line is one"


def _read(path: Path, settings: DataSettings, encode: Callable[[str], list[int]]) -> Iterator[Prompt]:
    if path.is_dir():
        yield from _code(path, settings, encode)
    elif path.suffix == ".jsonl":
        yield from _chats(path, settings)
    else:
        for line in _text(path).splitlines():
            if line.strip():
                yield _asked(line.strip(), settings)


def _asked(text: str, settings: DataSettings) -> Prompt:
    """A user's words as a prompt."""
    if settings.raw:
        return Prompt(text=text)
    return Prompt(_with_system(({"role": "user", "content": text},), settings))


def _with_system(messages: Messages, settings: DataSettings) -> Messages:
    if settings.system is None or messages[0]["role"] == "system":
        return messages
    return ({"role": "system", "content": settings.system}, *messages)


def _chats(path: Path, settings: DataSettings) -> Iterator[Prompt]:
    """``{"messages": [...]}`` up to its last user message, or ``{"prompt": "..."}``."""
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise OptionError(f"{path}:{number} is not JSON ({error})") from error
        messages = record.get("messages") if isinstance(record, dict) else None
        text = record.get("prompt") if isinstance(record, dict) else None
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            yield _chat(messages, settings, f"{path}:{number}")
        elif isinstance(text, str) and text.strip():
            yield _asked(text, settings)
        else:
            raise OptionError(f"{path}:{number} has neither messages (role, content) nor prompt (text)")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)


def _chat(messages: list[dict[str, Any]], settings: DataSettings, where: str) -> Prompt:
    if settings.raw:
        raise OptionError(f"{where} is a conversation, which --raw cannot continue; leave --raw out")
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise OptionError(f"{where} has no user message to answer")
    return Prompt(_with_system(tuple(messages[: last + 1]), settings))


def _code(folder: Path, settings: DataSettings, encode: Callable[[str], list[int]]) -> Iterator[Prompt]:
    rng, questions = random.Random(settings.seed), settings.instructions or INSTRUCTIONS
    asked = 0
    for path in code_files(folder, settings.code_suffixes):
        text = path.read_text(encoding="utf-8", errors="replace")
        if settings.raw:
            yield from _raw_pieces(encode(text), settings, rng)
            continue
        for piece in _pieces(text.splitlines(), settings, rng):
            question = questions[asked % len(questions)]
            asked += 1
            yield _asked(f"{question}\n\n```{path.suffix.removeprefix('.')}\n{piece}\n```", settings)


def _raw_pieces(ids: list[int], settings: DataSettings, rng: random.Random) -> Iterator[Prompt]:
    size = settings.code_tokens
    starts = range(0, len(ids) - size + 1, size)
    for start in sorted(rng.sample(starts, min(len(starts), settings.per_file))):
        yield Prompt(ids=tuple(ids[start : start + size]))


def _pieces(lines: list[str], settings: DataSettings, rng: random.Random) -> Iterator[str]:
    """Runs of lines, each of which begins at a line that is not indented where one is near."""
    size = settings.code_lines
    starts = list(range(0, max(len(lines) - size // 4, 1), size))
    for start in sorted(rng.sample(starts, min(len(starts), settings.per_file))):
        near = (i for i in range(start, min(start + size // 2, len(lines))) if lines[i][:1].strip())
        begin = next(near, start)
        piece = "\n".join(lines[begin : begin + size]).strip("\n")
        if piece.strip():
            yield piece


def code_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Files of these suffixes below ``folder``, sorted; hidden, generated and huge ones are left out."""
    found = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        skipped = any(part in SKIPPED or part.startswith(".") for part in inside)
        if not skipped and path.suffix in suffixes and path.is_file() and path.stat().st_size <= MOST_BYTES:
            found.append(path)
    return found


def _hash(path: Path, settings: DataSettings) -> str:
    if path.is_file():
        return hash_file(path)
    digest = hashlib.sha256()
    for file in code_files(path, settings.code_suffixes):
        digest.update(f"{file.relative_to(path).as_posix()} {hash_file(file)}\n".encode())
    return digest.hexdigest()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text (byte {error.start})") from error
