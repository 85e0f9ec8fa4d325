from collections.abc import Sequence
from typing import Any

Work = object

def set_helpers(count: int, /) -> None: ...
def count_helpers() -> int: ...
def finish(work: Work, /) -> Any: ...
def new_pool(limit: int, /) -> object: ...
def lend(pool: object, shape: tuple[int, ...], code: int, bits: int, /) -> object: ...
def lend_packed(
    pool: object,
    counts: Any,
    size: int,
    documents: int,
    width: int,
    token_bytes: int,
    labels: bool,
    positions: bool,
    /,
) -> list[tuple[Any | None, ...]]: ...
def free_bytes(pool: object, /) -> int: ...
def gather(out: Any, addresses: Any, item_bytes: int, /) -> None: ...
def start_gathering(out: Any, addresses: Any, item_bytes: int, /) -> Work: ...
def permute(cells: Any, size: int, highs: int, lows: int, keys: Any, /) -> None: ...
def locate_rows(chunks: Any, within: Any, rows: Any, starts: Any, /) -> bool: ...

Tables = tuple[Any, Any, int, Any, Any, int]

def read_rows(out: Any, rows: Any, starts: Any, tables: Tables, /) -> bool: ...
def fixed_addresses(addresses: Any, chunks: Any, within: Any, tables: Tables, /) -> bool: ...
def ragged_addresses(
    addresses: Any, chunks: Any, within: Any, tables: Tables, counts: Any, edges: Any, edge_limits: Any, /
) -> bool: ...
def decoded_addresses(
    addresses: Any,
    chunks: Any,
    within: Any,
    blocks: tuple[Any, int, int],
    table: tuple[Any, Any, Any, Any, Any],
    clock: int,
    item_bytes: int,
    ragged: tuple[Any, Any, Any] | None,
    /,
) -> int | None: ...
def can_decode() -> bool: ...
def start_decoding(frames: list[Any], outs: list[Any], /) -> Work: ...
def zstd_version() -> str: ...
def pack_rows(
    tokens_at: Any,
    token_bytes: int,
    width: int,
    lengths_at: Any,
    counts: Any,
    shifted: bool,
    size: int,
    batches: list[tuple[Any | None, ...]],
    /,
) -> int: ...
def start_packing(
    tokens_at: Any,
    token_bytes: int,
    width: int,
    lengths_at: Any,
    counts: Any,
    shifted: bool,
    size: int,
    batches: list[tuple[Any | None, ...]],
    /,
) -> Work: ...
def mirror(out: Any, content: Any, width: int, /) -> None: ...
def start_painting(
    canvas: Any,
    size: tuple[int, int],
    content: Any,
    box: tuple[int, int, int, int],
    pad: Sequence[int],
    streamed: bool,
    /,
) -> Work: ...
def start_painting_scaled(
    canvas: Any,
    size: tuple[int, int],
    content: Any,
    box: tuple[int, int, int, int],
    pad: Sequence[float],
    scale: Sequence[float],
    shift: Sequence[float],
    /,
) -> Work: ...
def token_places(places: Any, ids: Any, skipped: Any, offsets: Any, tokens: Any, text: Any, /) -> bool: ...
def best_fit(bins: Any, lengths: Any, capacity: int, /) -> None: ...
def copy_runs(out: Any, source: Any, targets: Any, starts: Any, lengths: Any, /) -> None: ...
def frame_documents(out: Any, item_bytes: int, ids: Any, offsets: Any, begin: int, end: int, /) -> None: ...
def line_starts(block: Any, at: int, /) -> list[int] | None: ...
