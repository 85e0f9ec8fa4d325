"""Pictures of masks: the right colors in the right places, from rows of any length."""

import numpy as np
import pytest

from forebay.masks import dense_mask, document_spans, windowed
from forebay.preview.draw import DOCUMENTS, FULL_BLOCK_SHADE, PADDING, UNSEEN, packed_row

LENGTHS, TOKENS = [[9, 4, 0], [2, 3, 5]], 16


def test_a_token_pair_is_colored_exactly_where_the_mask_is_true():
    for spans in (
        None,
        document_spans(LENGTHS, TOKENS, "bidirectional"),
        windowed(document_spans(LENGTHS, TOKENS), 3),
    ):
        drawn = np.asarray(packed_row(LENGTHS, TOKENS, row=1, spans=spans, pixels=TOKENS))
        seen = dense_mask(spans if spans is not None else document_spans(LENGTHS, TOKENS))[1]
        assert ((drawn != UNSEEN).any(axis=-1) == seen).all()


def test_documents_differ_in_color_and_padding_is_gray():
    drawn = np.asarray(packed_row(LENGTHS, TOKENS, pixels=TOKENS))
    diagonal = [tuple(map(int, drawn[token, token])) for token in range(TOKENS)]
    assert diagonal == [DOCUMENTS[0]] * 9 + [DOCUMENTS[1]] * 4 + [PADDING] * 3


def test_a_row_of_a_cache_is_drawn_as_it_is():
    lengths = np.array([9, 4], np.uint32)
    row = {"tokens": np.zeros(TOKENS, np.uint16), "seq_lens": lengths, "documents": np.zeros((2, 2))}
    drawn = packed_row(LENGTHS, TOKENS)
    assert packed_row(row) == drawn
    assert packed_row(lengths, TOKENS) == drawn


def test_blocks_computed_without_a_mask_are_dark():
    drawn = np.asarray(packed_row([[16]], 16, block_size=4, pixels=160))
    dark = (np.array(DOCUMENTS[0]) * FULL_BLOCK_SHADE).astype(np.uint8)
    block_centers = drawn[15::40, 15::40]
    assert ((block_centers == dark).all(axis=-1) == np.tri(4, k=-1, dtype=bool)).all()


def test_a_row_of_any_length_is_drawn_in_the_same_size():
    assert np.asarray(packed_row([[100_000, 20_000]], 131_072, block_size=8192)).shape == (480, 480, 3)


def test_what_is_not_one_packed_row_is_named():
    with pytest.raises(ValueError, match=r"a packed row has tokens and seq_lens \(got image, without seq_lens\)"):
        packed_row({"image": np.zeros(3)})
    ragged = {"tokens": np.zeros((2, 8)), "seq_lens": [[3, 5], [8]]}
    with pytest.raises(ValueError, match=r"draws one row: pass cache\[5\], not a slice of rows"):
        packed_row(ragged)
