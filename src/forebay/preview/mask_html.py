"""Masks and packed rows as HTML that a notebook shows: tables of numbers and small PNG pictures. numpy only."""

from base64 import b64encode
from collections.abc import Mapping
from html import escape

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.masks.documents import document_ids, padding_mask
from forebay.preview.draw import DOCUMENTS, PADDING, UNSEEN, encode_png

SEEN, SEEN_WHOLE = (127, 176, 222), (52, 104, 163)
SIDE = 192  # pixels of a mask; one of more tokens is sampled
SHOWN_ROWS, BAR_WIDTH = 6, 420


def sampled(length: int) -> NDArray[np.int64]:
    """Return the tokens that a picture of a mask shows: all, or `SIDE` of them at equal distances."""
    return np.arange(min(length, SIDE)) * length // min(length, SIDE)


def mask_html(title: str, facts: Mapping[str, object], seen: NDArray[np.bool_], whole: NDArray[np.bool_]) -> str:
    """Return facts of a mask and a picture of its first row, dark where `whole` blocks are seen."""
    colors = np.where(whole[:, :, None], SEEN_WHOLE, np.where(seen[:, :, None], SEEN, UNSEEN))
    lines = [f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items()]
    scale = max(1, SIDE // max(seen.shape))
    picture = _image(colors, seen.shape[1] * scale, seen.shape[0] * scale, "queries down, keys across")
    picture_line = f"<tr><th>first row</th><td>{picture}</td></tr>"
    return f"<table><caption>{escape(title)}</caption>{''.join(lines)}{picture_line}</table>"


def bars_html(seq_lens: ArrayLike, sequence_length: int) -> str:
    """Return the documents of the first rows as colored bars, padding gray; each bar is as wide as a row."""
    lengths = np.asarray(seq_lens)
    numbers = document_ids(lengths[:SHOWN_ROWS], sequence_length)
    padded = padding_mask(lengths[:SHOWN_ROWS], sequence_length)
    token = np.arange(BAR_WIDTH) * sequence_length // BAR_WIDTH
    lines = []
    for row, (number, pad) in enumerate(zip(numbers, padded, strict=True)):
        colors = np.where(pad[:, None], PADDING, np.array(DOCUMENTS)[number % len(DOCUMENTS)])
        documents, padding = int((lengths[row] > 0).sum()), int(pad.sum())
        label = f"{documents:,} {'document' if documents == 1 else 'documents'}, {padding:,} padding"
        bar = _image(colors[token][None], BAR_WIDTH, 12, label)
        lines.append(f"<tr><th>row {row}</th><td>{bar}</td><td>{label}</td></tr>")
    if len(lengths) > SHOWN_ROWS:
        lines.append(f"<tr><th></th><td>and {len(lengths) - SHOWN_ROWS:,} more rows</td><td></td></tr>")
    return f"<table><caption>Documents</caption>{''.join(lines)}</table>"


def _image(colors: NDArray[np.generic], width: int, height: int, label: str) -> str:
    source = b64encode(encode_png(colors.transpose(2, 0, 1))).decode("ascii")
    style = "image-rendering: pixelated; max-width: none"
    return (
        f'<img src="data:image/png;base64,{source}" alt="{escape(label)}" width="{width}" height="{height}" '
        f'style="{style}">'
    )
