"""DFlash: a block of masked slots denoised in one pass, conditioned on the target's features (arXiv 2602.06036).

Loads z-lab's checkpoints as published. The target's embedding and head are borrowed; the target is known only through
``contracts.Target``. Drafts are greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.contracts import NO_DRAFT, Draft, Target
from mlx_spec.drafters._dflash_config import DFlashConfig
from mlx_spec.drafters._dflash_context import SLACK
from mlx_spec.drafters._dflash_model import DFlashModel
from mlx_spec.drafters._dflash_weights import load_weights
from mlx_spec.drafters._settings import check_settings
from mlx_spec.errors import DrafterError, OptionError, PairError, UnsupportedError
from mlx_spec.folders import check_drafter, drafter_format

# DFlash and its relatives (names of folders.DRAFTERS): ``load`` names the key of a relative that is not implemented.
FORMATS = ("DFlash", "DFlash2", "DFlash successor", "DFly", "DeepSpec", "speculators")
SETTINGS = ("draft_window", "draft_swa_causal")
PADDING = 512  # rows by which two sizes of one vocabulary may differ, being padded to different multiples
PENDING = 64  # context rows that may wait unevaluated while nothing is proposed


Head = Callable[[mx.array], mx.array]  # [m, H] after the final norm -> logits


class DFlashDrafter:
    """``contracts.Drafter`` for one checkpoint. ``draft_window``: slots denoised per round, 2 .. the trained block."""

    name = "dflash"

    def __init__(self, config: DFlashConfig, model: DFlashModel, draft_window: int | None = None) -> None:
        self.config, self.model = config, model
        self.layers = config.target_layer_ids
        self.default_width = config.block_size
        self.max_width: int | None = config.block_size
        self.mask_id: int | None = config.mask_token_id
        self.draft_window = self._checked(draft_window)
        self.target: Target | None = None
        self.head: Head | None = None  # of the ids that can be drafted

    def bind(self, target: Target) -> None:
        """Raises PairError with both numbers where the drafter was made for another target, and UnsupportedError where
        the target's embedding cannot be borrowed."""
        config = self.config
        _same("hidden size", config.hidden_size, target.hidden_size)
        if config.num_target_layers is not None:
            _same("number of target layers", config.num_target_layers, target.num_layers)
        if max(self.layers) >= target.num_layers:
            raise PairError(f"the drafter taps layer {max(self.layers)}, the target's last is {target.num_layers - 1}")
        if not _padded_alike(config.vocab_size, target.vocab_size):
            _same("vocabulary", config.vocab_size, target.vocab_size)
        if config.mask_token_id >= target.vocab_size:
            raise PairError(f"mask_token_id {config.mask_token_id} is outside the target's {target.vocab_size} rows")
        target.embed(mx.array([config.mask_token_id]))  # measured at first use: refuses here, and not in a round
        self.target, ids = target, self.model.draft_ids
        self.head = target.head if ids is None else target.head_over(ids)

    def open(self, first: int, start: int = 0, draft_window: int | None = None) -> DFlashSession:
        """``first`` is not needed: slot 0 of a block is the anchor. Raises OptionError for a window outside 2 .. the
        trained block."""
        if self.target is None or self.head is None:
            raise PairError("a DFlash drafter borrows its target's embedding and head; bind it to a target first")
        window = self.draft_window if draft_window is None else self._checked(draft_window)
        return DFlashSession(self.config, self.model, self.target, self.head, start, window)

    def _checked(self, window: int | None) -> int:
        block = self.config.block_size
        if window is not None and not 2 <= window <= block:
            raise OptionError(f"draft_window {window} is outside 2..{block}, the drafter's trained block")
        return block if window is None else window


class DFlashSession:
    """Context keys and values of one conversation, each projected once. ``draft_window`` may be changed at any time."""

    def __init__(
        self,
        config: DFlashConfig,
        model: DFlashModel,
        target: Target,
        head: Head,
        start: int,
        window: int,
        slack: int = SLACK,
    ) -> None:
        self.config, self.model, self.target, self.draft_window = config, model, target, window
        self.head, self.ids = head, model.draft_ids
        self.start = start
        self.contexts = model.new_context(start, slack)
        self._dtype = self._head_dtype = model.hidden_norm.weight.dtype
        self._pending = 0

    @property
    def length(self) -> int:
        return self.contexts[0].length

    def ingest(self, tokens: Sequence[int], features: mx.array | None, start: int) -> None:
        """Raises DrafterError for missing features or a gap; the tokens themselves are not used."""
        if features is None or start != self.length:
            what = "no features" if features is None else f"rows from {start} on, but it holds {self.length}"
            raise DrafterError(f"the DFlash drafter was given {what}")
        if not features.shape[0]:
            return
        self.model.ingest(features.astype(self._dtype), self.contexts)
        self._pending += features.shape[0]
        if self._pending > PENDING:
            mx.async_eval(self.arrays())  # type: ignore[no-untyped-call]
            self._pending = 0

    def propose(self, anchor: int, count: int) -> Draft:
        """The first ``count`` of the ``draft_window - 1`` tokens denoised; the ids stay on the device."""
        count = min(count, self.draft_window - 1)
        if count < 1:
            return NO_DRAFT
        self._pending = 0
        logits = self.logits(self.hidden(anchor)[1 : count + 1])
        best = mx.argmax(logits, axis=-1)
        return Draft((best if self.ids is None else self.ids[best]).astype(mx.int32))

    def hidden(self, anchor: int) -> mx.array:
        """[draft_window, H] of ``[anchor, mask, mask, ...]`` from position ``length`` on, before the final norm."""
        ids = [anchor] + [self.config.mask_token_id] * (self.draft_window - 1)
        x = self.target.embed(mx.array(ids, dtype=mx.int32))
        self._head_dtype = x.dtype
        if self.config.input_embedding_scale != 1.0:
            x = x * self.config.input_embedding_scale
        return self.model(x.astype(self._dtype), self.contexts)

    def logits(self, hidden: mx.array) -> mx.array:
        """[k, H] -> [k, V] through the target's head (in the target's own dtype); with a reduced draft vocabulary its
        ids only."""
        return self.model.finish(self.head(self.model.norm(hidden).astype(self._head_dtype)))

    def trim(self, length: int) -> int:
        """``length`` where every layer still holds the rows that a query there sees; else the context is emptied and
        ``start`` is returned (0 where even that lies past ``length``), so that the caller feeds it again."""
        length = min(length, self.length)
        if all(context.can_trim(length) for context in self.contexts):
            for context in self.contexts:
                context.trim(length)
            return length
        for context in self.contexts:
            context.clear()
        return self.start if self.start <= length else 0

    def arrays(self) -> list[mx.array]:
        return [array for context in self.contexts for array in context.arrays()]


def reads(config: Mapping[str, Any]) -> bool:
    """Whether this config.json is for ``load``, if only to be told by key why it cannot serve."""
    return drafter_format(config) in FORMATS


def check(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError or CheckpointError naming the key that keeps this config.json from serving."""
    DFlashConfig.parse(config)
    if drafter_format(config) != "DFlash":
        named = config.get("architectures")
        raise UnsupportedError(f"a {drafter_format(config)} drafter (architectures {named}) is not plain DFlash")


def load(source: Path | None, settings: Mapping[str, Any]) -> DFlashDrafter:
    """From a folder with config.json and model*.safetensors.

    ``settings``: ``draft_window`` (2 .. trained block, default all of it) and ``draft_swa_causal`` ("auto": z-lab
    0.1.0's rule; "on" / "off": sliding layers are / are not causal within the block).

    Raises OptionError, ModelNotFoundError, CheckpointError, UnsupportedError naming a key, PairError (a language model,
    or weights for other taps).
    """
    check_settings("dflash", settings, SETTINGS)
    if source is None:
        raise OptionError("method dflash needs a drafter checkpoint; name its folder or hub id")
    folder = check_drafter(source)
    check(folder.config)
    config = DFlashConfig.parse(folder.config)
    model = load_weights(folder, config, settings.get("draft_swa_causal") or "auto")
    return DFlashDrafter(config, model, settings.get("draft_window"))


def _same(what: str, drafter: int, target: int) -> None:
    if drafter != target:
        raise PairError(f"drafter and target do not belong together: {what} {drafter} against the target's {target}")


def _padded_alike(one: int, other: int) -> bool:
    """Whether two sizes can be one vocabulary, padded to different multiples of 64."""
    gap, larger = abs(one - other), max(one, other)
    return gap == 0 or (gap <= PADDING and gap * 200 <= larger and larger % 64 == 0)
