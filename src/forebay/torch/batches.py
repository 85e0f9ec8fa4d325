"""Tensors of a batch, in reused memory: columns as they are stored, and arrays as tensors.

Every column becomes a tensor as it is stored; a ragged one becomes `name` (flat values) and `name.offsets`. Batches for
language models are made in `forebay.torch.token_batch`.

Derive int64 tokens, labels and positions of packed rows on the device that trains.

The host hands out tokens as they are stored and the lengths of documents, 2 bytes a token instead of 24:

    loader = Loader(cache, global_batch_size=48, derive="device")
    for batch in loader:
        sent = {name: values.to("cuda", non_blocking=True) for name, values in batch.items()}
        batch = derive_on_device(sent)          # or torch.compile(derive_on_device)

Batches and block masks in a notebook: shapes and types, documents as colored bars, who sees whom as a picture.

A batch of a `Loader` shows itself, and so does torch's `BlockMask`; `show_batch(batch)` shows any dict of tensors, in a
terminal too.
"""

import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils._pytree import MappingKey, register_pytree_node

from forebay.columns import Array, Columns, Ragged
from forebay.masks.documents import IGNORED_LABEL, LabelStyle, checked_label_style
from forebay.preview.mask_html import bars_html, mask_html, sampled
from forebay.records import html_table

if TYPE_CHECKING:  # importing it imports torch's compiler
    from torch.nn.attention.flex_attention import BlockMask


Batch = dict[str, Any]  # of tensors; max_seqlen is an int
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_LINE = 64  # bytes
_SMALLEST = 16 * 1024  # bytes; smaller arrays are as fast from malloc


class Buffers:
    """Hands out memory of any shape, that of earlier batches where some is free. Threads may share it.

    Memory belongs to the storage of one tensor. When the last tensor over that storage is freed, its memory is free for
    another batch: nothing is counted or returned by hand. At most `limit_bytes` of all shapes together stay free.

        memory ◀── storage ◀── tensor, its slices, its transposes, arrays made of it, …
           └─────── free again when the storage is freed

    With a GPU, batches are in pinned memory of torch's own allocator, which also waits for copies in flight. It tracks
    them, those of slices too, by the storage that it made, so `wrap` returns the tensor with that storage.
    """

    def __init__(self, limit_bytes: int, *, pinned: bool | None = None) -> None:
        self._limit = limit_bytes
        self._pinned = torch.cuda.is_available() if pinned is None else pinned
        self._lock = threading.Lock()
        self._returned: deque[Array] = deque()
        self._free: dict[int, list[Array]] = {}  # by size, the one that was used last at the end
        self._free_bytes = self._newest = 0  # newest: the size that was returned last
        self._lent: dict[int, weakref.ref[Array]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has its own memory.
        return Buffers, (self._limit,)

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for further batches."""
        with self._lock:
            self._collect()
            return self._free_bytes

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array to write to, and then to pass to `wrap`."""
        if not self._pinned and prod(shape) * dtype.itemsize < _SMALLEST:
            return np.empty(shape, dtype)
        (array,) = self.several(1, shape, dtype)
        return array

    def several(self, count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Array]:
        """Return arrays to write to, and then to pass to `wrap`, each with its own memory."""
        size = prod(shape) * dtype.itemsize
        if self._pinned:
            kind = _torch_dtype(dtype)
            return [torch.empty(shape, dtype=kind, pin_memory=True).numpy() for _ in range(count)]
        if size < _SMALLEST:
            return [np.empty(shape, dtype) for _ in range(count)]  # as fast from malloc
        return [self._lend(np.ndarray(shape, dtype, memory), memory) for memory in self._memory(count, size)]

    def _lend(self, view: Array, memory: Array) -> Array:
        self._lent[id(view)] = weakref.ref(view, partial(self._take_back, id(view), memory))
        return view

    def as_pinned(self, values: Array) -> Array:
        """Return an array as it is, or with a GPU copied into pinned memory."""
        if not self._pinned:
            return values
        pinned = self.empty(values.shape, values.dtype)
        np.copyto(pinned, values)
        return pinned

    def _memory(self, count: int, size: int) -> list[Array]:
        with self._lock:
            if self._returned:
                self._collect()
            free = self._free.get(size, [])
            found = [free.pop() for _ in range(min(count, len(free)))]
            self._free_bytes -= size * len(found)
            if not free:
                self._free.pop(size, None)
        return found + [_aligned(size) for _ in range(count - len(found))]

    def _collect(self) -> None:
        """Take up what was returned, and drop memory of the sizes that were used longest ago beyond the limit."""
        while self._returned:
            memory = self._returned.popleft()
            size = len(memory)
            if size != self._newest:  # the sizes that were used longest ago come first
                self._free[size] = self._free.pop(size, [])
                self._newest = size
            self._free.setdefault(size, []).append(memory)
            self._free_bytes += size
        while self._free_bytes > self._limit and self._free:
            size, free = next(iter(self._free.items()))
            free.pop()
            self._free_bytes -= size
            if not free:
                del self._free[size]

    def _take_back(self, key: int, memory: Array, view: object) -> None:
        """Called when a view is freed: in any thread, at any point, so it must not take a lock."""
        del self._lent[key]
        self._returned.append(memory)


def _aligned(size: int) -> Array:
    """Return memory that begins with a line of the CPU cache, so that no store of compiled code crosses two of them."""
    memory = np.empty(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + size]


def wrap(values: Array) -> torch.Tensor:
    """Return the tensor that an array was made from, or a tensor over its memory."""
    base = values.base
    if base is None or type(base) is np.ndarray:  # isinstance of a Tensor takes as long as making one
        return torch.from_numpy(values)
    return base if isinstance(base, torch.Tensor) else torch.from_numpy(values)


def to_tensor(values: Array, buffers: Buffers | None = None) -> torch.Tensor:
    """Return an array as a tensor, copied only into pinned memory; ml_dtypes' bfloat16 becomes torch's."""
    if values.dtype == _BFLOAT16:
        return to_tensor(values.view(np.int16), buffers).view(torch.bfloat16)
    return wrap(values if buffers is None else buffers.as_pinned(values))


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def plain_batch(read: Columns, buffers: Buffers) -> Batch:
    """Return columns as they are stored."""
    batch: Batch = {}
    for name, values in read.items():
        if isinstance(values, Ragged):
            batch[name] = to_tensor(values.values, buffers)
            batch[f"{name}.offsets"] = to_tensor(values.offsets, buffers)
        else:
            batch[name] = to_tensor(values, buffers)
    return batch


def tensor_bytes(batch: Mapping[str, object]) -> int:
    """Return the bytes of a batch's tensors."""
    return sum(value.nbytes for value in batch.values() if isinstance(value, Tensor))


def to_array(values: Tensor | ArrayLike) -> Array:
    """Return a tensor of any device as an array; torch's bfloat16 becomes ml_dtypes'. Else, `np.asarray`."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    if values.dtype == torch.bfloat16:
        return to_array(values.detach().contiguous().view(torch.int16)).view(_BFLOAT16)
    array: Array = values.numpy(force=True)
    return array


def to_device(values: Array, like: torch.Tensor) -> torch.Tensor:
    """Return an array on the device of `like`, floats also of its dtype; integers keep theirs."""
    own = torch.from_numpy(np.array(values, np.float32 if values.dtype.kind in "fV" else values.dtype))
    return own.to(like.device, like.dtype) if own.is_floating_point() else own.to(like.device)


def to_numpy(values: torch.Tensor) -> NDArray[np.float32]:
    """Return a tensor as a float32 array."""
    found: NDArray[np.float32] = values.float().cpu().numpy()
    return found


def derive_on_device(batch: dict[str, Tensor], labels: LabelStyle | None = "shifted") -> dict[str, Tensor]:
    """Return the batch with `tokens`, `labels` and `positions` as int64, equal to those that a `Loader` derives.

    `tokens` are as stored, `[rows, sequence_length]`, and `seq_lens` `[rows, max_documents]`, zero-padded.
    """
    style = checked_label_style("labels", labels)
    tokens = _widened(batch["tokens"])
    starts, stops = _document_edges(batch["seq_lens"], tokens.shape[1])
    column = torch.arange(tokens.shape[1], device=tokens.device)
    derived = batch | {"tokens": tokens, "positions": column - starts}
    if style is not None:
        derived["labels"] = _labels(tokens, column, starts, stops, batch["seq_lens"], style)
    return derived


def _widened(tokens: Tensor) -> Tensor:
    """Return tokens as int64. Devices have few operations on unsigned types, so their bits are read as signed ones."""
    if tokens.dtype == torch.uint16:
        return tokens.view(torch.int16).to(torch.int64) & 0xFFFF
    if tokens.dtype == torch.uint32:
        return tokens.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return tokens.to(torch.int64)


def _document_edges(seq_lens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return where the document of each token starts and stops, `[rows, width]`; padding is one more document."""
    stops = seq_lens.to(torch.int64).cumsum(1)
    column = torch.arange(width, device=seq_lens.device).expand(len(seq_lens), width).contiguous()
    document = torch.searchsorted(stops, column, right=True)
    edges = torch.cat([stops.new_zeros(len(stops), 1), stops, stops.new_full((len(stops), 1), width)], dim=1)
    return edges.gather(1, document), edges.gather(1, document + 1)


def _labels(
    tokens: Tensor, column: Tensor, starts: Tensor, stops: Tensor, seq_lens: Tensor, style: LabelStyle
) -> Tensor:
    padding = column >= seq_lens.sum(1, keepdim=True)
    if style == "shifted":
        return tokens.roll(-1, 1).masked_fill(padding | (column + 1 == stops), IGNORED_LABEL)
    return tokens.masked_fill(padding | (column == starts), IGNORED_LABEL)


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


_NO_PIXEL_MASK = "no pixel_mask in this batch; pass masks='host' to ImageBatch, or use masks_on_device(batch)"


class LoadedBatch(dict[str, Any]):
    """A batch of a `Loader`: a dict that is a table in a notebook, and says how to get a pixel mask.

    Trainers, `torch.compile`, `tree_map` and DDP take it as a dict. Pickled it is an OrderedDict, which `torch.load`
    reads with `weights_only`, and processes read without forebay.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        return BatchTable(self)._repr_html_()

    def __missing__(self, name: str) -> Any:
        raise KeyError(_NO_PIXEL_MASK if name == "pixel_mask" and "box" in self else name)

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
