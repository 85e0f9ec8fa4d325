"""Show a batch or a block mask in a notebook: shapes and types, documents as colored bars, who sees whom as a picture.

A batch of a `Loader` shows itself, and so does torch's `BlockMask`; `show_batch(batch)` shows any dict of tensors, in a
terminal too.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import MappingKey, register_pytree_node

from forebay.cache.records import html_table
from forebay.masks.mask_html import bars_html, mask_html, sampled

if TYPE_CHECKING:  # importing it imports torch's compiler
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, slots=True)
class BatchTable:
    """What a batch contains: lines as text, a table in a notebook."""

    batch: Mapping[str, object]

    def __repr__(self) -> str:
        facts = _facts(self.batch)
        width = max(map(len, facts), default=0)
        return "\n".join(f"{name:{width}}  {fact}" for name, fact in facts.items()) or "an empty batch"

    def _repr_html_(self) -> str:
        return html_table("Batch", _facts(self.batch)) + _bars(self.batch.get("tokens"), self.batch.get("seq_lens"))


class LoadedBatch(dict[str, Any]):
    """A batch of a `Loader`: a dict that is a table in a notebook.

    Trainers, `torch.compile`, `tree_map` and DDP take it as a dict. Pickled it is an OrderedDict, which `torch.load`
    reads with `weights_only`, and processes read without forebay.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        return BatchTable(self)._repr_html_()

    def __copy__(self) -> "LoadedBatch":
        return LoadedBatch(self)

    def __reduce__(self) -> tuple[type, tuple[()], None, None, Iterator[tuple[str, Any]]]:
        return OrderedDict, (), None, None, iter(self.items())


def _keyed(batch: LoadedBatch) -> tuple[list[tuple[Any, Any]], list[str]]:
    return [(MappingKey(name), value) for name, value in batch.items()], list(batch)


def _rebuilt(values: Iterable[Any], names: Any) -> LoadedBatch:
    return LoadedBatch(zip(names, values, strict=True))


# torch takes an unknown subclass of dict for a leaf.
register_pytree_node(
    LoadedBatch,
    lambda batch: (list(batch.values()), list(batch)),
    _rebuilt,
    serialized_type_name="forebay.torch.LoadedBatch",
    flatten_with_keys_fn=_keyed,
)


def show_batch(batch: Mapping[str, object]) -> BatchTable:
    """Return a table of the batch: leave `show_batch(batch)` as the last line of a notebook cell."""
    return BatchTable(dict(batch))


def _facts(batch: Mapping[str, object]) -> dict[str, str]:
    return {str(name): _fact(value) for name, value in batch.items()}


def _fact(value: object) -> str:
    if not isinstance(value, Tensor | np.ndarray):
        return type(value).__name__
    where = f" on {value.device}" if isinstance(value, Tensor) and value.device.type != "cpu" else ""
    return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(str, value.shape))}]{where}"


def _bars(tokens: object, seq_lens: object) -> str:
    """The documents of packed rows; nothing where a transform made something else of the two."""
    if not (isinstance(tokens, Tensor) and isinstance(seq_lens, Tensor) and tokens.ndim == seq_lens.ndim == 2):
        return ""
    if not len(tokens) or not tokens.shape[1] or len(tokens) != len(seq_lens):
        return ""
    try:
        return bars_html(seq_lens.cpu().numpy(), tokens.shape[1])
    except (TypeError, ValueError):  # not lengths
        return ""


@dataclass(frozen=True, slots=True)
class MaskPicture:
    """Who sees whom in the first row of a block mask, as a table and a picture in a notebook."""

    mask: "BlockMask"

    def _repr_html_(self) -> str:
        queries, keys = (torch.from_numpy(sampled(length)) for length in self.mask.seq_lengths)
        head = torch.zeros((), dtype=torch.int64, device=self.mask.kv_num_blocks.device)
        seen = self.mask.mask_mod(head, head, queries[:, None].to(head.device), keys.to(head.device))
        whole_blocks = _first_full_blocks(self.mask)
        whole = whole_blocks[queries[:, None] // self.mask.BLOCK_SIZE[0], keys // self.mask.BLOCK_SIZE[1]]
        facts = _mask_facts(self.mask, whole_blocks.shape[1])
        return mask_html("BlockMask", facts, seen.expand(whole.shape).cpu().numpy(), whole.numpy())


def show_mask(mask: "BlockMask") -> MaskPicture:
    """Return a picture of the mask's first row: leave `show_mask(mask)` as the last line of a notebook cell."""
    return MaskPicture(mask)


def show_masks_in_notebooks() -> None:
    """Let IPython, where it runs, draw block masks; they are torch's, so that they cannot have a method for it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        formatter = shell.display_formatter.formatters["text/html"]
        name = ("torch.nn.attention.flex_attention", "BlockMask")
        if formatter.for_type_by_name(*name) is None:  # nobody else draws them
            formatter.for_type_by_name(*name, lambda mask: MaskPicture(mask)._repr_html_())


def _mask_facts(mask: "BlockMask", key_blocks: int) -> dict[str, object]:
    counts = (mask.kv_num_blocks, mask.full_kv_num_blocks)
    seen_blocks = sum(int(count.sum()) for count in counts if count is not None)
    return {
        "shape": " × ".join(f"{length:,}" for length in mask.shape),
        "block size": " × ".join(map(str, mask.BLOCK_SIZE)),
        "blocks seen": f"{seen_blocks:,} of {mask.kv_num_blocks.numel() * key_blocks:,}",
        "device": mask.kv_num_blocks.device,
    }


def _first_full_blocks(mask: "BlockMask") -> Tensor:
    """Return which blocks `[query blocks, key blocks]` of the first row are seen without a mask."""
    size = tuple(-(-length // side) for length, side in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True))
    full = torch.zeros(size, dtype=torch.bool)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        for line, (count, indices) in enumerate(
            zip(mask.full_kv_num_blocks[0, 0].tolist(), mask.full_kv_indices[0, 0].tolist(), strict=True)
        ):
            full[line, indices[:count]] = True
    return full
