"""Columns of rows: names, types, storage, and ragged values.

fixed   tokens  uint16 (4,)      ragged  pixels  uint8
        ┌──┬──┬──┬──┐                    ┌──┬──┬──┐
row 0   │ 5│ 7│ 7│ 0│            row 0   │ 9│ 9│ 3│
row 1   │ 1│ 0│ 0│ 0│            row 1   ├──┼──┴──┘
        └──┴──┴──┴──┘                    │ 4│           values 9 9 3 4, offsets 0 3 4
                                         └──┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.errors import RecipeInvalid

Array = NDArray[Any]
Codec = Literal["none", "lz4", "zstd"]
Level = Literal["fast", "default", "max"]
CodecField = Annotated[Codec, msgspec.Meta(description="Compression.")]  # of a recipe
LevelField = Annotated[Level, msgspec.Meta(description="Compression level.")]
Dtype = Literal[
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64",
]  # fmt: skip
# Every column type: its name, its tag in a safetensors header, its numpy type.
DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "bool": ("BOOL", np.dtype("?")),
    "uint8": ("U8", np.dtype("u1")),
    "uint16": ("U16", np.dtype("<u2")),
    "uint32": ("U32", np.dtype("<u4")),
    "uint64": ("U64", np.dtype("<u8")),
    "int8": ("I8", np.dtype("i1")),
    "int16": ("I16", np.dtype("<i2")),
    "int32": ("I32", np.dtype("<i4")),
    "int64": ("I64", np.dtype("<i8")),
    "float16": ("F16", np.dtype("<f2")),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float32": ("F32", np.dtype("<f4")),
    "float64": ("F64", np.dtype("<f8")),
}
BLOCK_BYTES = 64 * 1024
MAX_ITEM_BYTES = 1 << 48  # of one row, or of one value of a ragged row
MAX_SIDES = 16
_RESERVED = ("__metadata__", "row", "row_id")  # by safetensors, and for the names of rows in batches
_MAX_BLOCK_ROWS = 1 << 40  # no chunk has more rows: such a block is the whole chunk


class Column(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One named column: its type and how it is stored.

    `shape` is the shape of one row; for a ragged column, of one of the values a row is made of.
    `rows_per_block` rows share one checksum and, when there is a codec, one compressed block.

    A dictionary column stores equal values of a chunk once: `index` is the uint32 column of the same layer with the row
    of the chunk that holds the value of each row. Recipes make it as `Ragged`, empty for all other rows.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...] = ()
    ragged: bool = False
    codec: Codec = "none"
    level: Level = "default"
    rows_per_block: int = 0
    index: str = ""

    def __post_init__(self) -> None:
        if not self.name or "." in self.name or "/" in self.name:
            raise RecipeInvalid(
                f"column name '{self.name}' is empty or contains a dot or slash", hint="use letters and _"
            )
        if self.name in _RESERVED:
            raise RecipeInvalid(f"column name '{self.name}' is reserved", hint="choose another")
        if any(side < 0 for side in self.shape):
            raise RecipeInvalid(f"column '{self.name}' has a negative side in its shape {self.shape}")
        if len(self.shape) > MAX_SIDES or prod(max(1, side) for side in self.shape) > MAX_ITEM_BYTES // 8:
            shown = f"{len(self.shape)} sides" if len(self.shape) > MAX_SIDES else f"the shape {self.shape}"
            raise RecipeInvalid(
                f"column '{self.name}' has rows of {shown}; at most {MAX_SIDES} sides and "
                f"{MAX_ITEM_BYTES // 8:,} values are allowed"
            )
        if self.rows_per_block < 0:
            raise RecipeInvalid(f"column '{self.name}' has rows_per_block {self.rows_per_block}; 0 means automatic")

    @property
    def array_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype][1]

    @property
    def has_offsets(self) -> bool:
        """Whether rows are stored with different lengths."""
        return self.ragged or bool(self.index)

    @property
    def item_bytes(self) -> int:
        """Bytes of one row, or of one value of a ragged row."""
        return self.array_dtype.itemsize * prod(self.shape)

    @property
    def block_rows(self) -> int:
        """Rows per block: as declared, or as many as fill about 64 KiB (ragged: 64 rows)."""
        if self.rows_per_block:
            return min(self.rows_per_block, _MAX_BLOCK_ROWS)
        return 64 if self.has_offsets else max(1, BLOCK_BYTES // max(1, self.item_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Rows of different lengths: row *i* is `values[offsets[i]:offsets[i + 1]]`."""

    values: Array
    offsets: Array

    @classmethod
    def of(cls, rows: list[Array], dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> "Ragged":
        """
        >>> Ragged.of([np.array([9, 9, 3]), np.array([4])], np.dtype("u1")).offsets.tolist()
        [0, 3, 4]
        """
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        values = np.concatenate(rows).astype(dtype, copy=False) if rows else np.empty((0, *shape), dtype)
        return cls(values, offsets)

    @classmethod
    def of_bytes(cls, rows: list[bytes]) -> "Ragged":
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.frombuffer(b"".join(rows), np.uint8), offsets)

    def __repr__(self) -> str:
        return f"<Ragged of {len(self):,} rows, {len(self.values):,} values of {self.values.dtype}>"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        if not -len(self) <= row < len(self):
            raise IndexError(f"there is no row {row}; there are {len(self):,} rows")
        row %= len(self)
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    @property
    def lengths(self) -> Array:
        lengths: Array = self.offsets[1:] - self.offsets[:-1]  # a third of the time of np.diff for a batch
        return lengths

    def padded(self, value: Any = 0) -> tuple[Array, Array]:
        """The rows as one array as wide as the longest, filled up with `value`, and their lengths.

        >>> Ragged.of([np.array([9, 9, 3]), np.array([4])], np.dtype("u1")).padded()[0].tolist()
        [[9, 9, 3], [4, 0, 0]]
        """
        lengths = self.lengths.astype(np.int64)
        inside = np.arange(lengths.max(initial=0)) < lengths[:, None]
        wide = np.full((*inside.shape, *self.values.shape[1:]), value, self.values.dtype)
        wide[inside] = self.values[int(self.offsets[0]) : int(self.offsets[-1])]
        return wide, lengths

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.offsets.nbytes)


Columns = Mapping[str, Array | Ragged]


def join(pieces: Sequence[Array | Ragged]) -> Array | Ragged:
    """Concatenate the values of one column.

    >>> join([Ragged.of_bytes([b"a", b"bc"]), Ragged.of_bytes([b"d"])]).offsets.tolist()
    [0, 1, 3, 4]
    """
    ragged = [piece for piece in pieces if isinstance(piece, Ragged)]
    if len(ragged) < len(pieces):
        return np.concatenate([piece for piece in pieces if not isinstance(piece, Ragged)])
    offsets = np.zeros(sum(map(len, ragged)) + 1, np.int64)
    # Offsets of a file are uint64; added to a list of Python integers they would become float64.
    np.cumsum(np.concatenate([piece.lengths.astype(np.int64, copy=False) for piece in ragged]), out=offsets[1:])
    return Ragged(np.concatenate([piece.values for piece in ragged]), offsets)
