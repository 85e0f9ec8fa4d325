"""From the columns of some rows to the tensors of a batch."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from forebay import masks
from forebay.columns import Array, Ragged
from forebay.masks.documents import LabelStyle

Batch = dict[str, torch.Tensor]
Extra = Literal["positions", "document_ids", "cu_seqlens"]


def padded_lengths(lengths: Ragged) -> Array:
    """Lengths of the documents of each row, int32 `[rows, max_documents]`, zero-padded."""
    counts = lengths.lengths
    padded = np.zeros((len(lengths), max(1, int(counts.max(initial=0)))), np.int32)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = lengths.values[lengths.offsets[0] : lengths.offsets[-1]]
    return padded


def token_batch(columns: Mapping[str, Array | Ragged], labels: LabelStyle | None, extras: Sequence[Extra]) -> Batch:
    """The batch of a token cache."""
    read = dict(columns)
    lengths = read.pop("seq_lens")
    assert isinstance(lengths, Ragged)
    tokens = np.asarray(read.pop("tokens")).astype(np.int64)
    seq_lens = padded_lengths(lengths)
    arrays: dict[str, Array] = {"tokens": tokens, "seq_lens": seq_lens}
    width = tokens.shape[1]
    if labels is not None:
        arrays["labels"] = masks.labels(tokens, seq_lens, labels)
    if "positions" in extras:
        arrays["positions"] = masks.positions(seq_lens, width).astype(np.int64)
    if "document_ids" in extras:
        arrays["document_ids"] = masks.document_ids(seq_lens, width)
    if "cu_seqlens" in extras:
        arrays["cu_seqlens"] = masks.cu_seqlens(seq_lens, width)
        arrays["max_seqlen"] = np.array(masks.whole_lengths(seq_lens, width).max(), np.int32)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
