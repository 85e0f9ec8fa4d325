"""Derive int64 tokens, labels and positions of packed rows on the device that trains.

The host hands out tokens as they are stored and the lengths of documents, 2 bytes a token instead of 24:

    loader = Loader(cache, global_batch_size=48, collate=TokenBatch(cache, on_device=True))
    for batch in loader:
        sent = {name: values.to("cuda", non_blocking=True) for name, values in batch.items()}
        batch = derive_on_device(sent)          # or torch.compile(derive_on_device)
"""

import torch
from torch import Tensor

from forebay.masks.documents import IGNORED_LABEL, LabelStyle, checked_label_style


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
