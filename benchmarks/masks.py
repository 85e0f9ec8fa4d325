"""How long it takes to make a FlexAttention block mask: from lengths, and by torch's search over S × S pairs.

Run with `python -m benchmarks.masks`. Peers: `torch.nn.attention.flex_attention.create_block_mask`, as it is
and under `torch.compile` (compile time not counted). All make the same mask; that is checked before timing.
"""

import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from forebay.torch import BlockMaskCache, document_block_mask

SIZES = ((1, 2048), (8, 4096), (4, 8192), (1, 32_768))
PAIRS = ("kv", "full_kv", "q", "full_q")
MEAN_DOCUMENT = 400
HEADINGS = ("rows × tokens", "document_block_mask", "cached", "eager", "compiled", "× eager", "× compiled")


class Timing(NamedTuple):
    rows: int
    sequence_length: int
    ours: float  # seconds
    cached: float
    eager: float
    compiled: float


def main() -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    # One kernel per size: without this the third size would be compiled for dynamic shapes.
    torch._dynamo.config.automatic_dynamic_shapes = False
    table = Table(title=f"block mask of causal packed documents, CPU, {torch.get_num_threads()} threads, milliseconds")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for rows, sequence_length in SIZES:
        table.add_row(*_cells(measure(rows, sequence_length)))
    Console(width=120).print(table)


def measure(rows: int, sequence_length: int) -> Timing:
    seq_lens = packed_lengths(rows, sequence_length)
    mask_mod = document_block_mask(seq_lens, sequence_length).mask_mod
    cache = BlockMaskCache()
    compiled_builder = torch.compile(create_block_mask)

    def ours() -> BlockMask:
        return document_block_mask(seq_lens, sequence_length)

    def cached() -> BlockMask:
        return cache.get(document_block_mask, seq_lens, sequence_length)

    def eager() -> BlockMask:
        return create_block_mask(mask_mod, rows, 1, sequence_length, sequence_length, device="cpu")

    def compiled() -> BlockMask:
        return compiled_builder(mask_mod, rows, 1, sequence_length, sequence_length, device="cpu")

    for other in (cached, eager, compiled):
        _check_equal(ours(), other())
    return Timing(
        rows,
        sequence_length,
        _median(ours, 200),
        _median(cached, 200),
        _median(eager, 3),
        _median(compiled, 5),
    )


def packed_lengths(rows: int, sequence_length: int) -> Tensor:
    """Documents of exponentially distributed length, cut to fill each row but for a short tail."""
    generator = np.random.default_rng(0)
    lengths = np.zeros((rows, sequence_length), np.int32)
    for row in lengths:
        drawn = 1 + generator.exponential(MEAN_DOCUMENT, sequence_length).astype(np.int32)
        row[:] = np.diff(np.minimum(drawn.cumsum(), sequence_length - 10), prepend=0)
    return torch.from_numpy(lengths[:, : int((lengths > 0).sum(axis=1).max())].copy())


def _median(call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _check_equal(one: BlockMask, other: BlockMask) -> None:
    for pair in PAIRS:
        count = getattr(one, f"{pair}_num_blocks")
        used = torch.arange(getattr(one, f"{pair}_indices").shape[-1]) < count[..., None]
        indices = (getattr(mask, f"{pair}_indices")[used] for mask in (one, other))
        if not (torch.equal(count, getattr(other, f"{pair}_num_blocks")) and torch.equal(*indices)):
            raise AssertionError(f"the masks differ in {pair}; timing them would compare different things")


def _cells(timing: Timing) -> list[str]:
    milliseconds = [f"{1000 * seconds:,.3f}" for seconds in timing[2:]]
    ratios = [f"{seconds / timing.ours:,.0f}" for seconds in (timing.eager, timing.compiled)]
    return [f"{timing.rows} × {timing.sequence_length:,}", *milliseconds, *ratios]


if __name__ == "__main__":
    main()
