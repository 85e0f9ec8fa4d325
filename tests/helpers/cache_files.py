"""The files of a cache, for tests that look at them or damage them. Tests build no key by hand.

Everything is found through `forebay.format.layout` and by what is on the disk.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import forebay as fb
from forebay.cache.reports import LayerStatus
from forebay.cache.segment import Segment
from forebay.columns import Ragged
from forebay.format import layout
from forebay.source import Part, SourceFile


@dataclass(frozen=True)
class CacheFiles:
    """Where the files of a cache are. Lists are in the order of their numbers."""

    root: Path

    @property
    def document(self) -> Path:
        return self.root / layout.CACHE

    @property
    def base(self) -> str:
        return layout.decode_cache_document(self.document.read_bytes(), str(self.root), layout.CACHE).base

    @property
    def generations(self) -> list[Path]:
        return self._sorted(layout.GENERATIONS, layout.parse_generation)

    @property
    def segments(self) -> list[Path]:
        return self._sorted(layout.PLAN, layout.parse_segment)

    @property
    def identities(self) -> list[Path]:
        return self._sorted(layout.IDENTITIES, layout.parse_identities)

    @property
    def claims(self) -> list[Path]:
        return [path for path in self._below(layout.CLAIMS) if path.suffix == ".json"]

    def layer_folder(self, layer: str | None = None) -> Path:
        return layer_path(self.root, layer or self.base)

    def recipe(self, layer: str | None = None) -> Path:
        return recipe_path(self.root, layer or self.base)

    def constants(self, layer: str | None = None) -> Path:
        return constants_path(self.root, layer or self.base)

    def chunks(self, layer: str | None = None) -> dict[int, Path]:
        """chunk -> its file."""
        keys = [self.key(path) for path in self._below(self.key(self.layer_folder(layer)))]
        numbers = {parsed[1]: key for key in keys if (parsed := layout.parse_chunk(key)) is not None}
        return {number: self.root / numbers[number] for number in sorted(numbers)}

    def chunk(self, number: int, layer: str | None = None) -> Path:
        return self.chunks(layer)[number]

    def key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _sorted(self, folder: str, number: Callable[[str], int | None]) -> list[Path]:
        return sorted(
            (path for path in self._below(folder) if number(self.key(path)) is not None),
            key=lambda path: (number(self.key(path)), path.name),
        )

    def _below(self, folder: str) -> list[Path]:
        return sorted(path for path in (self.root / folder).rglob("*") if path.is_file())


def flip(path: Path, position: int | None = None, mask: int = 1) -> None:
    """Change one byte of a file in place, under every map of it; without a position, the middle one."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2 if position is None else position)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ mask]))


def cut(path: Path, size: int = -1) -> None:
    """Shorten a file to a size, or by so many bytes where it is negative."""
    content = path.read_bytes()
    path.write_bytes(content[:size])


def digests(root: Path) -> dict[str, str]:
    """The SHA-256 of every chunk file of every layer, by key."""
    files = sorted(path for path in (root / layout.LAYERS).rglob("*") if path.is_file())
    keys = {path.relative_to(root).as_posix(): path for path in files}
    return {
        key: hashlib.sha256(path.read_bytes()).hexdigest()
        for key, path in keys.items()
        if layout.parse_chunk(key) is not None
    }


def row_digests(root: Path) -> list[str]:
    """A digest of every row over the columns of all layers, in the order of rows."""
    cache = fb.open_cache(root)
    columns = cache.read(np.arange(len(cache))) if len(cache) else {}
    return [
        hashlib.sha256(b"".join(_row_bytes(columns[name], row) for name in sorted(columns))).hexdigest()
        for row in range(len(cache))
    ]


def _row_bytes(column: object, row: int) -> bytes:
    value = column[row] if isinstance(column, Ragged) else np.asarray(column)[row]
    return value.shape[0].to_bytes(8, "little") + value.tobytes() if value.ndim else value.tobytes()


def content(root: Path) -> tuple[list[str], dict[str, dict[str, list[int | float]]]]:
    """All that a reader gets: the digests of rows, and the constants of every layer."""
    cache = fb.open_cache(root)
    constants = {layer: cache.constants(layer) for layer in cache.layers}
    return row_digests(root), {
        layer: {name: values.ravel().tolist() for name, values in columns.items()}
        for layer, columns in constants.items()
    }


def layer_status(root: Path, layer: str | None = None) -> LayerStatus:
    """The status of a layer, by default the base layer, from the index alone."""
    layers = fb.status(root, depth="index").layers
    return layers[0] if layer is None else next(one for one in layers if one.layer == layer)


def layer_path(root: Path, layer: str) -> Path:
    """The folder of a layer's chunks: the newest one, if the layer was replaced."""
    folders = [path for path in (root / layout.LAYERS).glob(f"{layer}.*") if path.is_dir()]
    if not folders:
        return root / layout.layer_folder(layer, "0" * layout.FINGERPRINT_DIGITS)
    return max(folders, key=lambda path: path.stat().st_ctime_ns)


def chunk_path(root: Path, layer: str, chunk: int) -> Path:
    """Where a chunk is, or was."""
    return root / layout.chunk(_folder_key(root, layer), chunk)


def recipe_path(root: Path, layer: str) -> Path:
    return root / layout.recipe(layer)


def constants_path(root: Path, layer: str) -> Path:
    return root / layout.constants(_folder_key(root, layer))


def _folder_key(root: Path, layer: str) -> str:
    return f"{layer_path(root, layer).relative_to(root).as_posix()}/"


def chunk_key(root: Path, layer: str, chunk: int) -> str:
    return chunk_path(root, layer, chunk).relative_to(root).as_posix()


def recipe_key(root: Path, layer: str) -> str:
    return recipe_path(root, layer).relative_to(root).as_posix()


def real_key(root: Path, name: str) -> str:
    """The key of `LAYER/NAME` below a layer folder, or of the claim `claims/LAYER/NAME`; other keys as they are."""
    top, layer, *rest = name.split("/") if name.count("/") == 2 else (name, "")
    if top not in ("layers", "claims"):
        return name
    return f"{top}/{layer_path(root, layer).name}/{rest[0]}"


def segment_of(
    chunks: Sequence[Sequence[Part]],
    *,
    number: int = 0,
    first_chunk: int = 0,
    source: Mapping[str, Any] = MappingProxyType({"kind": "x"}),
    weight: int = 1,
    previous: str = "",
    empty: Iterable[SourceFile] = (),
) -> Segment:
    """A segment of chunks whose files come one after the other; `empty` are files without samples."""
    files = {part.file.path: part.file for chunk in chunks for part in chunk}
    files |= {file.path: file for file in empty if file.path not in files}
    return Segment.planned(
        chunks,
        files.values(),
        number=number,
        first_chunk=first_chunk,
        source=source,
        weight=weight,
        previous=previous,
    )
