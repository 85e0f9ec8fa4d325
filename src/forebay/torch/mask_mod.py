"""The `mask_mod` functions of our block masks: who sees whom, token by token.

Each closes over tensors of a fixed shape and over nothing else, so that new documents, another window or
another prefix are new tensor contents: `torch.compile` keeps its kernel.
"""

from collections.abc import Callable
from types import CellType, FunctionType

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal_mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A row without documents."""
    return kv <= q


def causal_span_mask_mod(first: Tensor) -> MaskMod:
    """Keys from `first[b, q]` up to the query itself: causal documents, with or without a window."""

    def causal_span(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (kv >= first[b, q])

    return causal_span


def span_mask_mod(first: Tensor, stop: Tensor) -> MaskMod:
    """Keys from `first[b, q]` to before `stop[b, q]`: bidirectional documents and prefix-LM."""

    def span(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv >= first[b, q]) & (kv < stop[b, q])

    return span


def key_mask_mod(keep: Tensor) -> MaskMod:
    """The keys with `keep[b, kv]`, for every query: padding masks of images."""

    def kept_key(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return keep[b, kv]

    return kept_key


def captured_tensors(mask_mod: MaskMod) -> tuple[Tensor, ...]:
    """The tensors a `mask_mod` closes over, those of functions it closes over included."""
    return tuple(_tensors_in([cell.cell_contents for cell in _cells(mask_mod)]))


def moved_mask_mod(mask_mod: MaskMod, device: torch.device | str) -> MaskMod:
    """The same function over the same tensors on another device: what `BlockMask.to` leaves behind."""
    if not _cells(mask_mod):
        return mask_mod
    assert isinstance(mask_mod, FunctionType)
    cells = tuple(CellType(_moved(cell.cell_contents, device)) for cell in _cells(mask_mod))
    moved = FunctionType(mask_mod.__code__, mask_mod.__globals__, mask_mod.__name__, mask_mod.__defaults__, cells)
    moved.__qualname__ = mask_mod.__qualname__
    return moved


def dense_mask(mask_mod: MaskMod, rows: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The mask `[rows, 1, queries, keys]` by its definition, True = sees."""
    head = rows.new_zeros(())
    mask = mask_mod(rows[:, None, None, None], head, queries[:, None], keys)
    return mask.expand(len(rows), 1, len(queries), len(keys))


def _cells(mask_mod: MaskMod) -> tuple[CellType, ...]:
    # A partial or a callable object has no closure; we make neither.
    return (getattr(mask_mod, "__closure__", None)) or ()


def _tensors_in(content: object) -> list[Tensor]:
    if isinstance(content, Tensor):
        return [content]
    if isinstance(content, FunctionType):
        return list(captured_tensors(content))
    if isinstance(content, tuple | list):
        return [tensor for item in content for tensor in _tensors_in(item)]
    return []


def _moved(content: object, device: torch.device | str) -> object:
    if isinstance(content, Tensor):
        return content.to(device)
    if isinstance(content, FunctionType):
        return moved_mask_mod(content, device)
    if isinstance(content, tuple | list):
        return type(content)(_moved(item, device) for item in content)
    return content
