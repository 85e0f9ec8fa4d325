"""Masks derived from document lengths and letterbox rectangles. numpy only.

documents    lengths → ids, positions, starts, labels, cu_seqlens
spans        lengths → the span of keys each query sees (causal, bidirectional, window, prefix-LM) → block lists
train_on     spans of chat caches → which tokens are trained, with which weight; also of the candidates of a prompt
rectangle    rectangle → pixel mask, token mask, boxes, latent weights

`forebay.preview.draw` draws them.
"""

from forebay.masks.documents import (
    cu_seqlens,
    doc_start,
    doc_stop,
    document_ids,
    label_mask,
    labels,
    padding_mask,
    positions,
    whole_lengths,
)
from forebay.masks.rectangle import (
    flip_rectangles,
    latent_weights,
    pixel_mask,
    resize_rectangles,
    token_ignore_mask,
    token_padding,
)
from forebay.masks.spans import (
    Spans,
    causal_spans,
    dense_mask,
    document_spans,
    key_block_lists,
    prefix_spans,
    span_block_lists,
    windowed,
)
from forebay.masks.train_on import KINDS, ROLES, TrainOn, candidate_weights, token_weights

__all__ = [
    "KINDS",
    "ROLES",
    "Spans",
    "TrainOn",
    "candidate_weights",
    "causal_spans",
    "cu_seqlens",
    "dense_mask",
    "doc_start",
    "doc_stop",
    "document_ids",
    "document_spans",
    "flip_rectangles",
    "key_block_lists",
    "label_mask",
    "labels",
    "latent_weights",
    "padding_mask",
    "pixel_mask",
    "positions",
    "prefix_spans",
    "resize_rectangles",
    "span_block_lists",
    "token_ignore_mask",
    "token_padding",
    "token_weights",
    "whole_lengths",
    "windowed",
]
