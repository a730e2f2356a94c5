"""Settings of the front ends: one table of keys, and where their values come from.

Precedence: flag, then environment (``MLX_SPEC_<KEY>``), then file (TOML), then the table's default. Knows names,
types and ranges; knows no model and imports nothing heavy.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.errors import OptionError
from mlx_spec.options import EXACTNESS, MAX_WIDTH

PREFIX = "MLX_SPEC_"
OTHER_VARIABLES = {"MLX_SPEC_DEBUG", "MLX_SPEC_CONFIG"}
TRUE, FALSE = ("true", "on", "yes", "1"), ("false", "off", "no", "0")


@dataclass(frozen=True)
class Key:
    """One setting. ``kind``: "text", "whole", "number", "switch", "choice" or "widths"."""

    name: str
    kind: str
    default: Any
    help: str
    flag: str  # as typed on the command line; "" where there is none
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def env(self) -> str:
        return PREFIX + self.name.upper()

    def parse(self, raw: Any, where: str = "") -> Any:
        """A value from text or TOML. Raises OptionError that names the key, the value and what would do."""
        label = where or self.name
        if self.kind == "text":
            # An empty name is a shell variable that was not set, and would quietly mean the default.
            ok = isinstance(raw, str) and (bool(raw.strip()) or self.name == "system")
            return self._check(ok, raw, label, "text" if self.name == "system" else "a name")
        if self.kind == "choice":
            word = str(raw).lower() if not isinstance(raw, bool) else ("on" if raw else "off")
            return self._check(word in self.choices, word, label, "one of " + ", ".join(self.choices))
        if self.kind == "switch":
            word = str(raw).lower()
            self._check(word in TRUE + FALSE, raw, label, "on or off")
            return word in TRUE
        if self.kind == "widths":
            return self._widths(raw, label)
        return self._figure(raw, label)

    def _figure(self, raw: Any, label: str) -> Any:
        kind = int if self.kind == "whole" else float
        wanted = "a whole number" if kind is int else "a number"
        if self.low is not None:
            wanted += f" from {self.low}" + (f" to {self.high}" if self.high is not None else " up")
        try:
            value = kind(raw) if not isinstance(raw, bool) and not (kind is int and isinstance(raw, float)) else None
        except (TypeError, ValueError):
            value = None
        # ``value == value`` refuses NaN; infinities are refused by the range, or here where there is none.
        ok = value is not None and value == value and abs(value) != float("inf")
        ok = ok and (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        self._check(ok, raw, label, wanted)
        return value

    def _widths(self, raw: Any, label: str) -> int | tuple[int, ...]:
        parts = raw if isinstance(raw, list | tuple) else str(raw).split(",")
        one = Key(self.name, "whole", None, "", "", 1, MAX_WIDTH)
        widths = tuple(one.parse(part, label) for part in parts)
        self._check(bool(widths), raw, label, "a whole number, or several with commas")
        return widths[0] if len(widths) == 1 else widths

    @staticmethod
    def _check(ok: bool, raw: Any, label: str, wanted: str) -> Any:
        if not ok:
            raise OptionError(f"{label} must be {wanted}, not {raw!r}")
        return raw


KEYS: dict[str, Key] = {
    key.name: key
    for key in (
        Key("model", "text", None, "Target: a folder, a hub id, or a name from `mlx-spec models list`.", "--model"),
        Key("draft", "text", None, "Drafter: auto, off, a folder or a hub id; auto: the model's own, else ngram.",
            "--draft"),
        Key("method", "text", None, "How to draft; one of the drafters' names.", "--method"),
        Key("system", "text", None, "System prompt.", "--system"),
        Key("max_tokens", "whole", None, "Most tokens of an answer; -1: until the context is full. "
            "Default: 256 for generate, 1024 for chat.", "--max-tokens", -1),
        Key("temperature", "number", 0.0, "0: always the most likely token.", "--temp", 0, 100),
        Key("top_p", "number", 1.0, "Keep the most likely tokens up to this share; 1: all.", "--top-p", 0, 1),
        Key("top_k", "whole", 0, "Keep this many of the most likely tokens; 0: all.", "--top-k", 0),
        Key("min_p", "number", 0.0, "Drop tokens below this share of the most likely one.", "--min-p", 0, 1),
        Key("seed", "whole", None, "Makes sampling repeatable, with any drafter.", "--seed", 0, 2**63 - 1),
        Key("width", "widths", None, "Rows of a verify, drafts and anchor; several with commas take turns.", "--width"),
        Key("draft_window", "whole", None, "How many positions the drafter fills, at most.", "--draft-window", 2,
            MAX_WIDTH),
        Key("exactness", "choice", "fast", "Which guarantee the text carries.", "--exactness", choices=EXACTNESS),
        Key("blas", "choice", "auto", "Matrix library on Linux.", "--blas", choices=("auto", "bundled")),
        Key("fallback", "switch", False, "Go on without drafts when the drafter fails, and say so.", "--fallback"),
        Key("think", "choice", "auto", "The template's thinking switch; auto: the model's own default.", "--think",
            choices=("auto", "on", "off")),
        Key("show_thinking", "switch", None, "Show thinking, not only how long it took. Default: on a terminal.",
            "--show-thinking"),
        Key("markdown", "switch", True, "Render markdown on a terminal.", "--markdown"),
        Key("stats", "switch", True, "The line of figures after each answer.", "--stats"),
        Key("history", "switch", True, "Keep typed lines and conversations.", "--history"),
    )
}  # fmt: skip


class Settings(Mapping[str, Any]):
    """Resolved values, each with the source it came from: "flag", "environment", "file" or "default"."""

    def __init__(self, values: dict[str, Any], sources: dict[str, str], notes: tuple[str, ...] = ()) -> None:
        self._values = values
        self._sources = sources
        self.notes = notes

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def source(self, name: str) -> str:
        return self._sources[name]


def config_path(environ: Mapping[str, str] | None = None) -> Path:
    """``MLX_SPEC_CONFIG``, else the place this system keeps settings in."""
    from platformdirs import user_config_path

    named = (os.environ if environ is None else environ).get("MLX_SPEC_CONFIG")
    return user_path(named) if named else user_config_path("mlx-spec", appauthor=False) / "config.toml"


def user_path(text: str) -> Path:
    """A path as a user writes it: ``~`` and ``~name`` stand for home folders. Raises OptionError where no file can
    have that name."""
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # a name that is free, or a hub id
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        shown = text if len(text) < 80 else text[:60] + "..."
        raise OptionError(f"{shown!r} cannot be used as a path: {reason}; check the spelling") from error
    return path


def read_file(path: Path) -> dict[str, Any]:
    """The file's settings, checked; empty where there is no file. Raises OptionError naming path and key."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from error
    return {name: key_named(name, f"{path}: ").parse(value, f"{path}: {name}") for name, value in raw.items()}


def key_named(name: str, where: str = "") -> Key:
    if name not in KEYS:
        raise OptionError(f"{where}unknown setting {name!r}; known are {', '.join(KEYS)}")
    return KEYS[name]


def resolve(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, path: Path | None = None
) -> Settings:
    """Every key's value. ``flags`` holds parsed values; None means the flag was not given."""
    environ = os.environ if environ is None else environ
    layers = {
        "flag": {name: value for name, value in (flags or {}).items() if value is not None and name in KEYS},
        "environment": {
            key.name: key.parse(environ[key.env], key.env) for key in KEYS.values() if environ.get(key.env)
        },
        "file": read_file(path or config_path(environ)),
    }
    values, sources = {}, {}
    for name, key in KEYS.items():
        source = next((source for source, layer in layers.items() if name in layer), "default")
        values[name] = layers[source][name] if source != "default" else key.default
        sources[name] = source
    _one_source_for_drafting(values, sources, flags or {})
    known = {key.env for key in KEYS.values()} | OTHER_VARIABLES
    strange = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    notes = (f"ignored the environment's {', '.join(strange)}: no such setting",) if strange else ()
    return Settings(values, sources, notes)


def _one_source_for_drafting(values: dict[str, Any], sources: dict[str, str], flags: Mapping[str, Any]) -> None:
    """``draft`` and ``method`` name one choice: the stronger source decides both, so that
    ``--method plain`` is not contradicted by a drafter in the file."""
    order = ("flag", "environment", "file", "default")
    strongest = min((sources["draft"], sources["method"]), key=order.index)
    if flags.get("speculative_config") is not None:
        strongest = "flag"
    for name in ("draft", "method"):
        if sources[name] != strongest:
            values[name], sources[name] = KEYS[name].default, "default"


def shown(value: object) -> str:
    """A value as ``config set`` would take it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def write_key(path: Path, name: str, text: str | None) -> Any:
    """Set a key in the file (None: remove it), comments kept, whole or not at all. Returns the parsed value."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    value = key_named(name).parse(text, name) if text is not None else None
    path = path.resolve()  # a link into a dotfiles folder stays a link
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8")) if path.exists() else tomlkit.document()
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not TOML ({error}); mend it before setting {name}") from error
    if text is None:
        if name not in document:
            key_named(name)  # a wrong name that is in the file may go, too
        document.pop(name, None)
    else:
        document[name] = list(value) if isinstance(value, tuple) else value
    _replace(path, tomlkit.dumps(document))
    return value


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o777)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


__all__ = ["KEYS", "Key", "Settings", "config_path", "key_named", "read_file", "resolve", "shown", "user_path",
           "write_key"]  # fmt: skip
