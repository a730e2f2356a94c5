"""What holds on this machine, found by running it: are rows independent of how many are run together?"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.contracts import Target

PROBE_PROMPT = 24  # rows in the cache before the rows that are compared


def rows_are_exact(target: Target, widths: Sequence[int]) -> int | None:
    """Compare every row of a verify with the same row run alone, bit for bit, on the real target.

    ``widths``: rows per verify to try. Returns None where all agree, else the first width that does not. Costs one
    prefill of 24 tokens and, for the widest, twice its rows. The ids are arbitrary but fixed.
    """
    widest = max(widths)
    ids = [(37 * index + 11) % target.vocab_size for index in range(PROBE_PROMPT + widest)]
    cache = target.new_cache()
    target.forward(mx.array(ids[:PROBE_PROMPT], dtype=mx.int32), cache)
    single = []
    for token in ids[PROBE_PROMPT:]:
        single.append(target.forward(mx.array([token], dtype=mx.int32), cache).logits)
        mx.eval(single[-1])
    for width in sorted(set(widths)):
        cache.trim(PROBE_PROMPT)
        rows = target.forward(mx.array(ids[PROBE_PROMPT : PROBE_PROMPT + width], dtype=mx.int32), cache).logits
        if not mx.array_equal(rows, mx.concatenate(single[:width])).item():
            return width
    return None
