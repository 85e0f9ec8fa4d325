"""Masks derived from document lengths and letterbox rectangles. numpy only.

documents    lengths → ids, positions, starts, labels, cu_seqlens
spans        lengths → the span of keys each query sees (causal, bidirectional, window, prefix-LM) → block lists
train_on     spans of chat caches → which tokens are trained, with which weight; also of the candidates of a prompt
rectangle    rectangle → pixel mask, token mask, boxes, latent weights

`forebay.preview.draw` draws them.
"""

from typing import TYPE_CHECKING

from forebay.exports import lazy_exports

# fmt: off
# isort: off
if TYPE_CHECKING:
    from forebay.masks.documents import (
        cu_seqlens as cu_seqlens, doc_start as doc_start, doc_stop as doc_stop, document_ids as document_ids,
        label_mask as label_mask, labels as labels, padding_mask as padding_mask, positions as positions,
        whole_lengths as whole_lengths,
    )
    from forebay.masks.rectangle import (
        flip_rectangles as flip_rectangles, latent_weights as latent_weights, pixel_mask as pixel_mask,
        token_ignore_mask as token_ignore_mask, token_padding as token_padding,
    )
    from forebay.masks.spans import (
        Spans as Spans, causal_spans as causal_spans, dense_mask as dense_mask, document_spans as document_spans,
        key_block_lists as key_block_lists, prefix_spans as prefix_spans, span_block_lists as span_block_lists,
        windowed as windowed,
    )
    from forebay.masks.train_on import (
        KINDS as KINDS, ROLES as ROLES, TrainOn as TrainOn, candidate_weights as candidate_weights,
        token_weights as token_weights,
    )
# fmt: on
# isort: on

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
