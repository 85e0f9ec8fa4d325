"""FlexAttention block masks of packed documents: from lengths, next to torch's search over all pairs of positions."""

import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from benchmarks.lib.options import Options
from benchmarks.lib.result import Result, compared
from benchmarks.lib.timing import in_turn, rate_of
from forebay.torch import document_block_mask

CASE = "masks.block_masks"
SIZES = ((1, 2048), (8, 4096), (4, 8192), (1, 32_768))
PAIRS = ("kv", "full_kv", "q", "full_q")
MEAN_DOCUMENT = 400


def measure(options: Options) -> Iterator[Result]:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    # One kernel per size: without this the third size would be compiled for dynamic shapes.
    torch._dynamo.config.automatic_dynamic_shapes = False
    for rows, sequence_length in SIZES[: 1 if options.is_quick else None]:
        yield from against_torch(rows, sequence_length, options.rounds)


def against_torch(rows: int, sequence_length: int, rounds: int) -> Iterator[Result]:
    seq_lens = packed_lengths(rows, sequence_length)
    mask_mod = document_block_mask(seq_lens, sequence_length).mask_mod
    compiled_builder = torch.compile(create_block_mask)

    def ours() -> BlockMask:
        return document_block_mask(seq_lens, sequence_length)

    def eager() -> BlockMask:
        return create_block_mask(mask_mod, rows, 1, sequence_length, sequence_length, device="cpu")

    def compiled() -> BlockMask:
        return compiled_builder(mask_mod, rows, 1, sequence_length, sequence_length, device="cpu")

    for other in (eager, compiled):
        _check_equal(ours(), other())
    works = {
        "ours": lambda: _masks_per_second(ours, 50),
        "eager": lambda: _masks_per_second(eager, 1),
        "compiled": lambda: _masks_per_second(compiled, 1),
    }
    rates = in_turn(works, rounds)
    work = f"document block mask, {rows} x {sequence_length:,}"
    for peer, name in (("create_block_mask", "eager"), ("create_block_mask, compiled", "compiled")):
        goal = {"eager": 500.0, "compiled": 50.0}[name] if (rows, sequence_length) == (8, 4096) else None
        yield compared(
            CASE, work, peer, rates["ours"], rates[name], unit="masks/s", equal="same index lists", at_least=goal
        )  # fmt: skip


def _masks_per_second(make: Callable[[], BlockMask], count: int) -> float:
    return rate_of(lambda: [make() for _ in range(count)], count)


def packed_lengths(rows: int, sequence_length: int) -> Tensor:
    """Documents of exponentially distributed length, cut to fill each row but for a short tail."""
    generator = np.random.default_rng(0)
    lengths = np.zeros((rows, sequence_length), np.int32)
    for row in lengths:
        drawn = 1 + generator.exponential(MEAN_DOCUMENT, sequence_length).astype(np.int32)
        row[:] = np.diff(np.minimum(drawn.cumsum(), sequence_length - 10), prepend=0)
    return torch.from_numpy(lengths[:, : int((lengths > 0).sum(axis=1).max())].copy())


def _check_equal(one: BlockMask, other: BlockMask) -> None:
    for pair in PAIRS:
        count = getattr(one, f"{pair}_num_blocks")
        used = torch.arange(getattr(one, f"{pair}_indices").shape[-1]) < count[..., None]
        indices = (getattr(mask, f"{pair}_indices")[used] for mask in (one, other))
        if not (torch.equal(count, getattr(other, f"{pair}_num_blocks")) and torch.equal(*indices)):
            raise AssertionError(f"the masks differ in {pair}; timing them would compare different things")
