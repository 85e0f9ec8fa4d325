"""What is counted while rows are made, and what the counts say."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from forebay.columns import Array
from forebay.tokens.documents import Documents
from forebay.tokens.rows import Packed

USE_BINS = 20  # shares of a row in use: [0, 5 %), [5, 10 %), … [95, 100 %), and full rows by themselves


def row_statistics(documents: Documents, kept: Array, packed: Packed, capacity: int) -> dict[str, int | list[int]]:
    """Counts of one chunk; they are summed over chunks."""
    used = _used(packed)
    return {
        "documents": int(np.count_nonzero(kept)),
        "documents_dropped": int(np.count_nonzero(kept == 0)),
        "documents_split": int(np.count_nonzero(kept > capacity)),
        "documents_cut": int(np.count_nonzero((kept < documents.lengths) & (kept > 0))),
        "characters": documents.characters,
        "tokens_in": int(documents.lengths.sum()),
        "tokens": int(used.sum()),
        "tokens_dropped": int((documents.lengths - kept).sum()),
        "raw_bytes": sum(column.nbytes for column in (packed.tokens, packed.seq_lens, packed.documents)),
        "rows_by_use": np.bincount(used * USE_BINS // capacity, minlength=USE_BINS + 1).tolist(),
    }


def _used(packed: Packed) -> Array:
    """How many tokens of each row are no padding."""
    passed = np.concatenate([[0], np.cumsum(packed.seq_lens.values, dtype=np.int64)])
    used: Array = np.diff(passed[packed.seq_lens.offsets])
    return used


def token_figures(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
    places = holds["rows"] * fields["sequence_length"]
    tokens, stored = statistics.get("tokens", 0), holds["bytes"]
    return {
        "padding_share": _ratio(places - tokens, places),
        "utilization": _ratio(tokens, places),
        "tokens_dropped_share": _ratio(statistics.get("tokens_dropped", 0), statistics.get("tokens_in", 0)),
        "bytes_per_token": _ratio(stored, tokens),
        "bits_per_token": _ratio(8 * stored, tokens),
        "compression_ratio": _ratio(statistics.get("raw_bytes", 0), stored),
        "characters_per_token": _ratio(statistics.get("characters", 0), statistics.get("tokens_in", 0)),
        "tokens_per_document": _ratio(tokens, statistics.get("documents", 0)),
    }


def old_metadata(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
    places = holds["rows"] * fields["sequence_length"]
    tokens = statistics.get("tokens", 0)
    return {
        "version": "1.0",
        "total_chunks": holds["chunks"],
        "total_sequences": holds["rows"],
        "max_length": fields["sequence_length"],
        "compression_enabled": fields["codec"] != "none",
        "utilization_stats": {
            "avg_utilization": _ratio(tokens, places),
            "total_tokens": tokens,
            "efficiency_ratio": _ratio(tokens, statistics.get("tokens_in", 0)),
        },
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
