from collections.abc import Sequence
from typing import Any

def gather(out: Any, addresses: Any, item_bytes: int, /) -> None: ...
def locate_rows(chunks: Any, within: Any, rows: Any, starts: Any, /) -> bool: ...
def gather_rows(out: Any, chunks: Any, rows: Any, bases: Any, limits: Any, item_bytes: int, /) -> bool: ...
def pack_rows(
    tokens_at: Any,
    token_bytes: int,
    width: int,
    lengths_at: Any,
    counts: Any,
    seq_lens: Any,
    stored: Any | None,
    wide: Any | None,
    labels: Any | None,
    positions: Any | None,
    shifted: bool,
    /,
) -> bool: ...
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
