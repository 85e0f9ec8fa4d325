"""Ids, positions, starts and labels of packed rows, against their definition token by token."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from row_cases import RowCase, row_cases

from forebay import masks
from forebay.masks import documents

LENGTHS = [[3, 2, 0]]


def test_the_drawing_of_the_module_holds():
    assert masks.document_ids(LENGTHS, 7).tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    assert masks.positions(LENGTHS, 7).tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert masks.doc_start(LENGTHS, 7).tolist() == [[0, 0, 0, 3, 3, 5, 5]]
    assert masks.doc_stop(LENGTHS, 7).tolist() == [[3, 3, 3, 5, 5, 7, 7]]
    assert masks.padding_mask(LENGTHS, 7).tolist() == [[False] * 5 + [True] * 2]
    assert masks.label_mask(LENGTHS, 7).astype(int).tolist() == [[1, 1, 0, 1, 0, 0, 0]]
    assert masks.label_mask(LENGTHS, 7, "unshifted").astype(int).tolist() == [[0, 1, 1, 0, 1, 0, 0]]
    assert masks.cu_seqlens(LENGTHS, 7).tolist() == [0, 3, 5, 7]


def test_the_examples_in_docstrings_hold():
    assert doctest.testmod(documents) == (0, 2)


def test_labels_are_the_next_token_or_the_token_itself():
    tokens = [[5, 6, 7, 8, 9, 0, 0]]
    assert masks.labels(tokens, LENGTHS).tolist() == [[6, 7, -100, 9, -100, -100, -100]]
    assert masks.labels(tokens, LENGTHS, "unshifted").tolist() == [[-100, 6, 7, -100, 9, -100, -100]]


def test_without_a_sequence_length_the_fullest_row_decides():
    assert masks.document_ids([[3, 2], [4, 0]]).tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]


def documents_by_hand(case: RowCase) -> list[list[tuple[int, int, int]]]:
    """(id, start, stop) of every token, by walking along each row."""
    rows = []
    for lengths in case.seq_lens.tolist():
        tokens, start = [], 0
        tail = case.sequence_length - sum(lengths)
        for number, length in enumerate([length for length in (*lengths, tail) if length]):
            tokens += [(number, start, start + length)] * length
            start += length
        rows.append(tokens)
    return rows


@given(row_cases())
def test_every_token_knows_its_document(case: RowCase):
    by_hand = np.array(documents_by_hand(case))
    assert (masks.document_ids(*case) == by_hand[..., 0]).all()
    assert (masks.doc_start(*case) == by_hand[..., 1]).all()
    assert (masks.doc_stop(*case) == by_hand[..., 2]).all()
    assert (masks.positions(*case) == np.arange(case.sequence_length) - by_hand[..., 1]).all()
    assert masks.document_ids(*case).dtype == masks.positions(*case).dtype == np.int32


@given(row_cases())
def test_no_label_is_padding_or_of_another_document(case: RowCase):
    rows, length = len(case.seq_lens), case.sequence_length
    tokens = np.arange(rows * length).reshape(rows, length)
    ids, padded = masks.document_ids(*case), masks.padding_mask(*case)
    for style, ahead in (("shifted", 1), ("unshifted", 0)):
        labels = masks.labels(tokens, case.seq_lens, style)
        for row, place in np.argwhere(labels != -100):
            predicted_from = place + ahead - 1
            assert labels[row, place] == tokens[row, predicted_from + 1]
            assert ids[row, predicted_from] == ids[row, predicted_from + 1]
            assert not padded[row, predicted_from + 1]
        assert (labels != -100).sum() == sum(max(0, n - 1) for n in case.seq_lens.ravel())


@given(case=row_cases(longest=12, most_rows=5))
@pytest.mark.parametrize("style", ["shifted", "unshifted"])
def test_filling_arrays_gives_what_deriving_new_ones_gives(case: RowCase, style):
    shape = (len(case.seq_lens), case.sequence_length)
    tokens = np.arange(shape[0] * shape[1], dtype=np.uint16).reshape(shape)
    labels, positions, ids = np.full(shape, 77, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int32)
    documents.fill_packed(tokens, case.seq_lens, style, labels=labels, positions=positions)
    documents.fill_document_ids(ids, masks.whole_lengths(*case))
    assert np.array_equal(labels, masks.labels(tokens, case.seq_lens, style))
    assert np.array_equal(positions, masks.positions(*case))
    assert np.array_equal(ids, masks.document_ids(*case))


@given(row_cases())
def test_cu_seqlens_are_the_boundaries_of_the_flat_batch(case: RowCase):
    flat = (masks.document_ids(*case) + 1000 * np.arange(len(case.seq_lens))[:, None]).ravel()
    boundaries = [0, *(np.flatnonzero(np.diff(flat)) + 1), flat.size]
    assert masks.cu_seqlens(*case).tolist() == boundaries


@pytest.mark.parametrize(
    ("seq_lens", "sequence_length", "sentence"),
    [
        ([3, 2], 7, r"shape \[rows, max_documents\] \(got \(2,\)\)"),
        ([[3, -2]], 7, "row 0 has a negative length"),
        ([[1, 1], [5, 3]], 7, "row 1 have 8 tokens but a row holds 7"),
        ([[0]], None, "sequence_length must be at least 1"),
        (np.zeros((0, 3), np.int32), 7, "seq_lens has no rows; skip an empty batch"),
        ([[1.0]], 3, r"seq_lens must be integers \(got float64\)"),
        ([[3]], 7.0, "sequence_length must be an int"),
        ([[3]], True, "sequence_length must be an int"),
    ],
)
def test_lengths_that_make_no_row_are_refused(seq_lens, sequence_length, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        masks.document_ids(seq_lens, sequence_length)


def test_an_unknown_style_of_labels_is_refused():
    with pytest.raises(ValueError, match="style must be 'shifted', 'unshifted'"):
        masks.label_mask(LENGTHS, 7, "last")
