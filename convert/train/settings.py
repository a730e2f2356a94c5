"""What data and training runs may be told, checked once at construction. A row is a flag and a recipe key alike.

Imports no mlx: a front end reads this table before it has chosen a BLAS. Defaults are the paper's (arXiv 2602.06036)
where it states them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from mlx_spec.errors import OptionError

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # the paper's, by trained block
MAX_BLOCK = 128
BITS = (4, 8, 16)
SPELLED = {"start_from": "from"}  # rows whose name is a word of Python's
S = TypeVar("S", bound="Settings")


def row(kind: type, help: str, default: Any = MISSING, choices: tuple[str, ...] = (), many: bool = False) -> Any:
    """A field with what a front end needs to make a flag of it."""
    metadata = {"kind": kind, "help": help, "choices": choices, "many": many}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """What both tables share: making one from a recipe and flags, and checks by row."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.metadata["many"] and isinstance(value, list):
                object.__setattr__(self, item.name, value := tuple(value))
            if value is None and item.default is None:
                continue
            values = value if item.metadata["many"] and isinstance(value, tuple) else (value,)
            for one in values:
                _check(item.name, one, item.metadata["kind"], item.metadata["choices"])

    @classmethod
    def make(cls: type[S], recipe: str | Path | None, given: Mapping[str, Any]) -> S:
        """From the recipe's table and what was given besides, which wins. Raises OptionError naming a key."""
        values = dict(read_recipe(recipe, cls.__name__.removesuffix("Settings").lower())) if recipe else {}
        values |= {name: value for name, value in given.items() if value is not None}
        known = {item.name: item for item in fields(cls)}
        for name in values:
            if name not in known:
                raise OptionError(f"{recipe} has the unknown key {name!r}; known are {', '.join(known)}")
        lacking = [name for name, item in known.items() if item.default is MISSING and name not in values]
        if lacking:
            raise OptionError(f"{flag(lacking[0])} is needed ({known[lacking[0]].metadata['help']})")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def changed(self: S, **values: Any) -> S:
        return replace(self, **values)

    def at_least(self, low: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < low:
                raise OptionError(f"{flag(name)} must be at least {low:g}, not {value}")


def flag(name: str) -> str:
    """What a user writes for a row."""
    return "--" + SPELLED.get(name, name.replace("_", "-"))


def _check(name: str, value: Any, kind: type, choices: tuple[str, ...]) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    fits = whole if kind is int else (whole or isinstance(value, float)) if kind is float else isinstance(value, kind)
    if not fits or (kind is float and value != value):
        word = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]
        raise OptionError(f"{flag(name)} must be {word}, not {value!r}")
    if choices and value not in choices:
        raise OptionError(f"{flag(name)} must be one of {', '.join(choices)}, not {value!r}")


def read_recipe(path: str | Path, table: str) -> dict[str, Any]:
    """One table of a TOML recipe. Raises OptionError for a file that is not there or is not TOML."""
    try:
        with Path(path).open("rb") as file:
            recipe = tomllib.load(file)
    except OSError as error:
        raise OptionError(f"the recipe {path} cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"the recipe {path} is not TOML ({error})") from error
    unknown = sorted(set(recipe) - {"data", "train"})
    if unknown:
        raise OptionError(f"the recipe {path} has the unknown table {unknown[0]!r}; known are data, train")
    found = recipe.get(table, {})
    if not isinstance(found, dict):
        raise OptionError(f"the recipe {path}: {table} must be a table")
    rows = {word: name for name, word in SPELLED.items()}
    return {rows.get(name, name.replace("-", "_")): value for name, value in found.items()}


@dataclass(frozen=True)
class DataSettings(Settings):
    """How prompts become answers. The target alone decides what it says: responses in the sources are not used."""

    target: str = row(str, "the model that answers: a folder, a hub id, a short name")
    prompts: tuple[str, ...] = row(str, "text (a prompt a line), JSONL chats, or a folder of code", many=True)
    out: str = row(str, "folder for the data")
    raw: bool = row(bool, "continue the texts as they are, without the chat template", False)
    think: str = row(str, "the template's thinking switch", "auto", ("auto", "on", "off"))
    system: str | None = row(str, "a system message before every prompt that has none", None)
    instructions: tuple[str, ...] = row(str, "what to ask about a piece of code, in turn", (), many=True)
    code_suffixes: tuple[str, ...] = row(str, "files of a folder that are code", (".py",), many=True)
    code_lines: int = row(int, "lines of a piece of code that is asked about", 40)
    code_tokens: int = row(int, "with --raw: tokens of a piece that is continued", 64)
    per_file: int = row(int, "pieces of one code file, at most", 8)
    limit: int | None = row(int, "prompts in all, at most", None)
    max_tokens: int = row(int, "tokens of an answer, at most", 256)
    max_prompt: int = row(int, "tokens of a prompt, at most; longer ones are left out", 1024)
    temperature: float = row(float, "0: greedy", 0.0)
    top_p: float = row(float, "with a temperature: nucleus", 1.0)
    batch: int = row(int, "answers made at once", 64)
    shard: int = row(int, "prompts a shard; what a kill can lose", 256)
    seed: int = row(int, "of the prompts' order and of sampling", 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.prompts, str) or not self.prompts:
            raise OptionError("--prompts is needed at least once (a file or a folder)")
        self.at_least(1, "code_lines", "code_tokens", "per_file", "limit", "max_prompt", "batch", "shard")
        self.at_least(2, "max_tokens")
        self.at_least(0, "temperature", "seed")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"--top-p must be above 0 and at most 1, not {self.top_p}")
        if self.top_p < 1 and not self.temperature:
            raise OptionError("--top-p has no effect at temperature 0; give --temperature or leave it out")
        if self.raw and (self.system or self.think != "auto" or self.instructions):
            raise OptionError("--raw knows no template: leave --system, --think and --instructions out")


@dataclass(frozen=True)
class TrainSettings(Settings):
    """A training run. Shape settings are None for "as the target has it", or as the drafter to adapt has it."""

    target: str = row(str, "the model whose drafter is trained: a folder, a hub id, a short name")
    data: str = row(str, "folder that `mlx-spec train data` wrote")
    out: str = row(str, "folder for checkpoints, curve and the drafter")
    held_out: str | None = row(str, "another data folder to measure on; none: a share of --data", None)
    held_out_share: float = row(float, "share of --data kept for measuring, where --held-out is not given", 0.05)
    held_out_sequences: int = row(int, "sequences measured on, at most", 48)
    start_from: str | None = row(str, "a drafter to adapt: a folder or a hub id", None)
    init: str = row(str, "a new drafter's weights: the target's last layers, or random", "target", ("target", "random"))
    layers: int | None = row(int, "decoder layers (5; a small target wants 1 or 2)", None)
    block: int | None = row(int, "trained block: the anchor and the slots denoised with it (16)", None)
    taps: tuple[int, ...] | None = row(int, "target layers tapped, counted from 0 (5, evenly)", None, many=True)
    mask_id: int | None = row(int, "id of the masked slots (an id that text never has)", None)
    intermediate: int | None = row(int, "width of the MLP (the target's)", None)
    heads: int | None = row(int, "query heads (the target's)", None)
    kv_heads: int | None = row(int, "key and value heads (the target's)", None)
    window: int | None = row(
        int, "all layers slide over this many tokens, causal in the block (none: all see all)", None
    )
    draft_vocab: int | None = row(int, "only this many of the most frequent tokens can be drafted", None)
    steps: int | None = row(int, "updates; or --epochs, or --minutes", None)
    epochs: float | None = row(float, "passes over the data (6 where neither is given)", None)
    minutes: float | None = row(float, "as many updates as fit, by a timing at the start", None)
    batch: int = row(int, "sequences a forward", 8)
    accumulate: int = row(int, "forwards an update", 1)
    anchors: int = row(int, "blocks a sequence, at most", 64)
    anchor_draw: str = row(str, "redrawn every epoch, or one after the other", "random", ("random", "fixed"))
    max_length: int = row(int, "tokens of a sequence, at most; the rest is cut off", 3072)
    features: str = row(
        str, "kept on disk, made anew each time, or none (ablation)", "cache", ("cache", "online", "off")
    )
    cache_dtype: str = row(str, "of features on disk", "bfloat16", ("bfloat16", "float32"))
    cache_dir: str | None = row(str, "where features are kept (in --out)", None)
    loss: str = row(str, "weights of the slots: the paper's, or D-PACE (2605.18810)", "decay", ("decay", "dpace"))
    gamma: float | None = row(float, "decay of the slots' weights (7, 5, 4 for block 16, 10, 8)", None)
    alpha: float = row(float, "D-PACE's smoothing", 0.5)
    lr: float = row(float, "peak learning rate", 6e-4)
    warmup: float = row(float, "share of the updates with a rising rate", 0.04)
    weight_decay: float = row(float, "AdamW's", 0.0)
    clip: float = row(float, "largest norm of a gradient", 1.0)
    dtype: str = row(str, "of the forward; weights are kept in float32", "auto", ("auto", "float32", "bfloat16"))
    compile: str = row(str, "mx.compile an update's gradients", "on", ("on", "off"))
    evaluate_every: int = row(int, "updates between two measurements", 200)
    save_every: int = row(int, "updates between two checkpoints", 200)
    keep: int = row(int, "checkpoints kept", 2)
    bits: int | None = row(int, "of the written drafter's weights: 16 (bfloat16), 8 or 4 (float32)", None)
    seed: int = row(int, "of everything drawn", 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "layers", "intermediate", "heads", "kv_heads", "steps", "batch", "accumulate", "anchors")
        self.at_least(1, "draft_vocab", "evaluate_every", "save_every", "keep", "held_out_sequences")
        self.at_least(2, "block", "window", "max_length")
        self.at_least(0, "seed", "mask_id", "weight_decay")
        if self.block is not None and self.block > MAX_BLOCK:
            raise OptionError(f"--block must be at most {MAX_BLOCK}, not {self.block}")
        for name in ("lr", "clip", "minutes", "epochs", "gamma"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise OptionError(f"{flag(name)} must be a positive number, not {value}")
        for name in ("held_out_share", "warmup", "alpha"):
            if not 0 <= getattr(self, name) < 1 + (name == "alpha"):
                raise OptionError(f"{flag(name)} must be from 0 to below 1, not {getattr(self, name)}")
        named = [name for name in ("steps", "epochs", "minutes") if getattr(self, name) is not None]
        if len(named) > 1:
            raise OptionError(f"{flag(named[0])} and {flag(named[1])} contradict each other; give one")
        if self.bits not in (None, *BITS):
            raise OptionError(f"--bits must be 4, 8 or 16, not {self.bits}")
        if self.taps is not None and (not self.taps or len(set(self.taps)) != len(self.taps) or min(self.taps) < 0):
            raise OptionError(f"--taps must be different layer numbers from 0 on, not {list(self.taps)}")
        self._check_start()

    def _check_start(self) -> None:
        if self.start_from is None:
            return
        shape = ("layers", "block", "taps", "mask_id", "intermediate", "heads", "kv_heads", "window", "draft_vocab")
        given = [name for name in shape if getattr(self, name) is not None]
        if given:
            raise OptionError(f"{flag(given[0])} and --from contradict each other: the drafter has its own")
        if self.features == "off":
            raise OptionError("--features off and --from contradict each other: that drafter uses features")


def default_gamma(block: int) -> float:
    """The paper's where it names one, else on the line between them."""
    if block in GAMMAS:
        return GAMMAS[block]
    points = sorted(GAMMAS.items())
    (b0, g0), (b1, g1) = (points[0], points[1]) if block < points[1][0] else (points[1], points[2])
    return max(1.0, g0 + (block - b0) * (g1 - g0) / (b1 - b0))


def default_taps(count: int, layers: int) -> tuple[int, ...]:
    """``count`` layers of ``layers``, evenly from the second to the third-last (z-lab's rule)."""
    if count == 1 or layers < 5:
        return tuple(sorted({layers // 2} if count == 1 else set(range(max(1, layers - count), layers))))
    return tuple(sorted({round(1 + i * (layers - 4) / (count - 1)) for i in range(count)}))
