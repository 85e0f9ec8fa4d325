from collections.abc import Sequence
from typing import Any

def gather(out: Any, addresses: Any, item_bytes: int, /) -> None: ...
def locate_rows(chunks: Any, within: Any, rows: Any, starts: Any, /) -> bool: ...

Tables = tuple[Any, Any, int, Any, Any, int]

def read_rows(out: Any, rows: Any, starts: Any, tables: Tables, /) -> bool: ...
def fixed_addresses(addresses: Any, chunks: Any, within: Any, tables: Tables, /) -> bool: ...
def ragged_addresses(
    addresses: Any, chunks: Any, within: Any, tables: Tables, counts: Any, edges: Any, edge_limits: Any, /
) -> bool: ...
def pack_rows(
    tokens_at: Any,
    token_bytes: int,
    width: int,
    lengths_at: Any,
    counts: Any,
    shifted: bool,
    size: int,
    batches: list[tuple[Any, Any | None, Any | None, Any | None, Any | None]],
    /,
) -> int: ...
def mirror(out: Any, content: Any, width: int, /) -> None: ...
def paint(
    canvas: Any, size: tuple[int, int], content: Any, box: tuple[int, int, int, int], pad: Sequence[int], /
) -> None: ...
def paint_scaled(
    canvas: Any,
    size: tuple[int, int],
    content: Any,
    box: tuple[int, int, int, int],
    pad: Sequence[float],
    scale: Sequence[float],
    shift: Sequence[float],
    /,
) -> None: ...
def token_places(places: Any, ids: Any, skipped: Any, offsets: Any, tokens: Any, text: Any, /) -> bool: ...
def best_fit(bins: Any, lengths: Any, capacity: int, /) -> None: ...
def copy_runs(out: Any, source: Any, targets: Any, starts: Any, lengths: Any, /) -> None: ...
