"""Which samples form which batch, drawn again every epoch, and told by (seed, number) alone: a resumed run needs no
other state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mlx_spec.convert.train.blocks import Blocks, fixed_anchors, make_blocks, random_anchors
from mlx_spec.convert.train.network import STEP
from mlx_spec.convert.train.shards import Sample
from mlx_spec.errors import OptionError

POOL = 16  # batches' worth of samples that are sorted by length, so that batches hold alike ones


@dataclass(frozen=True)
class Batch:
    samples: list[int]
    blocks: Blocks
    length: int  # context rows that cover what its anchors can see, a multiple of STEP


class Batches:
    """An endless row of batches over ``samples``."""

    def __init__(
        self, samples: Sequence[Sample], size: int, anchors: int, slots: int, gamma: float, draw: str, seed: int,
        to_draft: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.samples, self.size, self.anchors, self.slots = samples, size, anchors, slots
        self.gamma, self.draw, self.seed, self.to_draft = gamma, draw, seed, to_draft
        self.per_epoch = -(-len(samples) // size)
        self._order = lru_cache(maxsize=2)(self._ordered)

    def __getitem__(self, number: int) -> Batch:
        epoch, index = divmod(number, self.per_epoch)
        chosen = self._order(epoch)[index]
        anchors = [self._anchors(epoch, i) for i in chosen]
        picked = [self.samples[i] for i in chosen]
        blocks = make_blocks(picked, anchors, self.slots, self.gamma, self.to_draft)
        reach = max(1, int(blocks.anchors.max()))
        return Batch(chosen, blocks, -(-reach // STEP) * STEP)

    def _anchors(self, epoch: int, i: int) -> list[int]:
        if self.draw == "fixed":
            return fixed_anchors(self.samples[i], self.anchors, self.slots)
        return random_anchors(self.samples[i], self.anchors, np.random.default_rng([self.seed, 1, epoch, i]))

    def _ordered(self, epoch: int) -> list[list[int]]:
        rng = np.random.default_rng([self.seed, 0, epoch])
        order = rng.permutation(len(self.samples))
        batches = []
        for begin in range(0, len(order), self.size * POOL):
            pool = sorted(order[begin : begin + self.size * POOL].tolist(), key=lambda i: len(self.samples[i]))
            batches += [pool[at : at + self.size] for at in range(0, len(pool), self.size)]
        return [batches[i] for i in rng.permutation(len(batches))]


def split(samples: Sequence[Sample], share: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """(to learn from, to measure on), drawn by the seed. Raises OptionError where there are too few for both."""
    if len(samples) < 2:
        raise OptionError("one sequence is too little to learn from and to measure on; add data or give --held-out")
    count = min(max(1, round(len(samples) * share)), len(samples) - 1)
    order = np.random.default_rng([seed, 2]).permutation(len(samples))
    return [samples[i] for i in np.sort(order[count:])], [samples[i] for i in np.sort(order[:count])]
