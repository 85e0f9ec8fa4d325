"""Spans of keys, against the sentence that defines each kind of mask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_cases import RowCase, row_cases

from forebay import masks


def same_document(case: RowCase) -> np.ndarray:
    ids = masks.document_ids(*case)
    return ids[:, :, None] == ids[:, None, :]


def queries_and_keys(length: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(length)[:, None], np.arange(length)[None, :]


@given(row_cases())
def test_causal_documents_see_their_own_past(case: RowCase):
    query, key = queries_and_keys(case.sequence_length)
    assert (masks.dense_mask(masks.document_spans(*case)) == (same_document(case) & (key <= query))).all()


@given(row_cases())
def test_bidirectional_documents_see_themselves(case: RowCase):
    assert (masks.dense_mask(masks.document_spans(*case, "bidirectional")) == same_document(case)).all()


@given(row_cases(), st.integers(1, 70), st.sampled_from(["causal", "bidirectional"]))
def test_a_window_keeps_the_keys_that_are_near(case: RowCase, window: int, kind):
    query, key = queries_and_keys(case.sequence_length)
    spans = masks.document_spans(*case, kind)
    near = masks.dense_mask(spans) & (abs(query - key) < window)
    assert (masks.dense_mask(masks.windowed(spans, window)) == near).all()


@given(row_cases(), st.randoms(use_true_random=False))
def test_a_prefix_is_seen_by_its_whole_document(case: RowCase, random):
    prefix = np.vectorize(lambda n: random.randint(0, n), otypes=[np.int32])(case.seq_lens)
    query, key = queries_and_keys(case.sequence_length)
    # The padding tail has no prefix.
    prefix_of = np.pad(prefix, ((0, 0), (0, 1)))
    whole = masks.whole_lengths(*case)
    in_prefix = masks.positions(*case) < np.stack([np.repeat(p, n) for p, n in zip(prefix_of, whole, strict=True)])
    expected = same_document(case) & ((key <= query) | in_prefix[:, None, :])
    assert (masks.dense_mask(masks.prefix_spans(case.seq_lens, prefix, case.sequence_length)) == expected).all()


@given(st.integers(1, 40))
def test_a_row_without_documents_is_causal(length: int):
    assert (masks.dense_mask(masks.causal_spans(length))[0] == np.tri(length, dtype=bool)).all()


@given(row_cases(), st.integers(1, 70))
def test_spans_are_monotone_and_contain_their_query(case: RowCase, window: int):
    for kind in ("causal", "bidirectional"):
        for spans in (
            masks.document_spans(*case, kind),
            masks.windowed(masks.document_spans(*case, kind), window),
        ):
            query = np.arange(case.sequence_length)
            assert (np.diff(spans.first) >= 0).all()
            assert (np.diff(spans.stop) >= 0).all()
            assert ((spans.first <= query) & (query < spans.stop)).all()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: masks.document_spans([[3]], 3, "Causal"),
            r"kind must be 'causal' or 'bidirectional' \(got 'Causal'\)",
        ),
        (lambda: masks.windowed(masks.causal_spans(3), 0), r"window must be a whole number of at least 1 \(got 0\)"),
        (lambda: masks.prefix_spans([[3, 2]], [[0, 3]], 7), "document 1 of row 0 has 2 tokens but a prefix of 3"),
        (lambda: masks.prefix_spans([[3, 2]], [[0]], 7), r"shape \(1, 1\) but seq_lens has \(1, 2\)"),
        (lambda: masks.prefix_spans([[3, 2]], [[1.5, 0.0]], 7), r"prefix_lens must be integers \(got float64\)"),
    ],
)
def test_spans_that_cannot_be_raise(make, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        make()
