"""The table of tensors at the front of a GGUF file: names, shapes, storage types, and that the data is all there.

``mx.load`` reads the values; this looks first, because it neither checks lengths nor names what it cannot read.
Format: ggml's docs/gguf.md (version 3, little-endian).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mlx_spec.errors import CheckpointError, UnsupportedError

# Storage types by ggml's number: (name, values a block, bytes a block). These arrive from mx.load as they are stored.
READ = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
}
NAMES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    28: "F64",
    30: "BF16",
    39: "MXFP4",
}
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by metadata type
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32
MAX_COUNT = 1 << 24  # of anything that the header counts; more means that it is damaged


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]  # rows first, as MLX has it
    type: str
    offset: int  # bytes from the start of the file
    nbytes: int


def read_header(path: Path) -> tuple[Tensor, ...]:
    """The file's tensors. Raises CheckpointError (not GGUF, damaged, cut short) and UnsupportedError (an old version,
    a storage type that is not read; both named)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file")
        try:
            version = _number(file, "<I")
            if version not in (2, 3):
                raise UnsupportedError(f"{path} is GGUF version {version}; versions 2 and 3 are read")
            count, keys = _count(file), _count(file)
            alignment = _skip_metadata(file, keys)
            raw = [_info(file) for _ in range(count)]
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise CheckpointError(f"{path} has a damaged header or is cut short; download it again") from error
        start = -(-file.tell() // alignment) * alignment
    tensors = tuple(_place(path, start, *info) for info in raw)
    end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=start)
    if size < end:
        raise CheckpointError(f"{path} is cut short: {size} of {end} bytes; download it again")
    return tensors


def _place(path: Path, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Tensor:
    if kind not in READ:
        known = ", ".join(row[0] for row in READ.values())
        raise UnsupportedError(f"{path}: tensor {name} is stored as {NAMES.get(kind, kind)}; types read are {known}")
    label, values, nbytes = READ[kind]
    return Tensor(name, shape, label, start + offset, math.prod(shape) // values * nbytes)


def _info(file: BinaryIO) -> tuple[str, tuple[int, ...], int, int]:
    name = _string(file).decode()
    dimensions = tuple(_number(file, "<Q") for _ in range(_number(file, "<I")))
    return name, dimensions[::-1], _number(file, "<I"), _number(file, "<Q")


def _skip_metadata(file: BinaryIO, keys: int) -> int:
    """Past the key-value pairs; returns the alignment of the data."""
    alignment = DEFAULT_ALIGNMENT
    for _ in range(keys):
        name, kind = _string(file), _number(file, "<I")
        if name == b"general.alignment" and kind == 4:
            alignment = max(1, _number(file, "<I"))
        else:
            _skip_value(file, kind)
    return alignment


def _skip_value(file: BinaryIO, kind: int) -> None:
    if kind == STRING:
        _string(file)
    elif kind == ARRAY:
        inner, count = _number(file, "<I"), _count(file)
        for _ in _repeat(file, inner, count):
            _skip_value(file, inner)
    elif kind in SCALARS:
        file.seek(SCALARS[kind], 1)
    else:
        raise ValueError(f"metadata type {kind}")


def _repeat(file: BinaryIO, kind: int, count: int) -> Iterator[int]:
    """Numbers are passed over at once, strings one by one."""
    if kind in SCALARS:
        file.seek(SCALARS[kind] * count, 1)
        return iter(())
    return iter(range(count))


def _count(file: BinaryIO) -> int:
    value = _number(file, "<Q")
    if value > MAX_COUNT:
        raise ValueError(f"a count of {value}")
    return value


def _string(file: BinaryIO) -> bytes:
    length = _count(file)
    text = file.read(length)
    if len(text) < length:
        raise ValueError("the file ends inside a string")
    return text


def _number(file: BinaryIO, form: str) -> int:
    value: int = struct.unpack(form, file.read(struct.calcsize(form)))[0]
    return value
