"""What the device derives is what the loader's threads derive."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.token_caches import token_cache

import forebay as fb
from forebay import masks
from forebay.masks.documents import LabelStyle
from forebay.torch import Loader, TokenBatch, derive_on_device


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(token_cache(tmp_path_factory.mktemp("on_device"), 26))


@st.composite
def packed(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [rows, width] and lengths [rows, documents], zero-padded, that leave some padding."""
    rows, width, documents = draw(st.integers(1, 4)), draw(st.integers(1, 24)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([np.uint16, np.uint32, np.int64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens = rng.integers(0, min(np.iinfo(dtype).max, 2**32 - 1), (rows, width), np.int64, endpoint=True).astype(dtype)
    lengths = np.zeros((rows, documents), np.int32)
    for row in lengths:
        cuts = np.unique(rng.integers(0, width + 1, documents + 1))
        row[: len(cuts) - 1] = np.diff(cuts)
    return tokens, lengths


@given(packed(), st.sampled_from(["shifted", "unshifted", None]))
def test_the_device_derives_what_numpy_does(case: tuple[np.ndarray, np.ndarray], style: LabelStyle | None) -> None:
    tokens, lengths = case
    found = derive_on_device({"tokens": torch.from_numpy(tokens), "seq_lens": torch.from_numpy(lengths)}, style)
    width = tokens.shape[1]
    assert {values.dtype for name, values in found.items() if name != "seq_lens"} == {torch.int64}
    np.testing.assert_array_equal(found["tokens"], tokens)
    np.testing.assert_array_equal(found["positions"], masks.positions(lengths, width))
    if style is None:
        assert "labels" not in found
    else:
        np.testing.assert_array_equal(found["labels"], masks.labels(tokens, lengths, style))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_derives_what_a_cpu_does() -> None:
    batch = {"tokens": torch.arange(24, dtype=torch.int32).view(torch.uint32).reshape(2, 12)}
    batch["seq_lens"] = torch.tensor([[5, 4], [12, 0]], dtype=torch.int32)
    there = derive_on_device({name: values.cuda() for name, values in batch.items()})
    for name, values in derive_on_device(batch).items():
        assert torch.equal(there[name].cpu().view(values.dtype), values)


@pytest.mark.parametrize("style", ["shifted", "unshifted"])
def test_batches_for_the_device_become_those_of_the_loader(tokens: fb.Cache, style: LabelStyle) -> None:
    whole = next(iter(Loader(tokens, global_batch_size=4, seed=3, collate=TokenBatch(tokens, labels=style))))
    sent = next(iter(Loader(tokens, global_batch_size=4, seed=3, collate=TokenBatch(tokens, on_device=True))))
    assert set(sent) == {"tokens", "seq_lens"}
    assert sent["tokens"].dtype == torch.uint16
    derived = derive_on_device(sent | {"other": torch.tensor([7])}, style)
    assert derived.pop("other").tolist() == [7]
    assert set(derived) == set(whole)
    for name, values in whole.items():
        assert torch.equal(derived[name], values), name
