"""What notebooks show of batches and masks: numbers and pictures of ours, and the text of others as text."""

import copy
import pickle
import re
import sys
from base64 import b64decode
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.cache.test_records import NASTY, Cells
from tests.helpers.token_caches import token_cache
from torch.utils._pytree import tree_flatten_with_path, tree_map
from torch.utils.data import default_collate

import forebay as fb
from forebay.preview.draw import DOCUMENTS, PADDING, UNSEEN
from forebay.preview.mask_html import SEEN_WHOLE
from forebay.torch import (
    LoadedBatch,
    Loader,
    causal_block_mask,
    document_block_mask,
    image_block_mask,
    show_batch,
    show_mask,
)
from forebay.torch.batches import show_masks_in_notebooks

SEQ_LENS = [[3, 2], [6, 0]]


def pictures(html: str) -> list[np.ndarray]:
    found = re.findall(r'src="data:image/png;base64,([A-Za-z0-9+/=]+)"', html)
    assert html.count("<img") == len(found)
    return [np.asarray(Image.open(BytesIO(b64decode(each)))) for each in found]


def text_of(html: str) -> list[str]:
    cells = Cells(re.sub(r"<img [^>]*>", "", html))
    assert cells.tags <= {"table", "caption", "tr", "th", "td", "br"}
    return cells.text


def is_color(picture: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    return (picture == color).all(axis=-1)


def test_a_packed_batch_has_its_tensors_and_a_bar_per_row():
    batch = {"tokens": torch.zeros(2, 6, dtype=torch.int64), "seq_lens": torch.tensor(SEQ_LENS, dtype=torch.int32)}
    shown = show_batch(batch)
    assert repr(shown).splitlines() == ["tokens    int64 [2, 6]", "seq_lens  int32 [2, 2]"]
    html = shown._repr_html_()
    assert {"int64 [2, 6]", "2 documents, 1 padding", "1 document, 0 padding"} <= set(text_of(html))
    first, second = pictures(html)
    sixth = first.shape[1] // 6
    assert is_color(first[:, : 3 * sixth], DOCUMENTS[0]).all()
    assert is_color(first[:, 3 * sixth : 5 * sixth], DOCUMENTS[1]).all()
    assert is_color(first[:, 5 * sixth :], PADDING).all()
    assert is_color(second, DOCUMENTS[0]).all()


def test_many_rows_are_counted_and_a_batch_stays_as_it_is():
    batch = {"tokens": torch.zeros(50, 8), "seq_lens": torch.full((50, 1), 8)}
    html = show_batch(batch)._repr_html_()
    assert "and 44 more rows" in text_of(html)
    assert len(html) < 20_000
    assert type(batch) is dict


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(token_cache(tmp_path_factory.mktemp("batches"), 20))


@pytest.fixture
def batch(cache: fb.Cache) -> LoadedBatch:
    return next(iter(Loader(cache, global_batch_size=4, threads=0)))


def test_batches_of_a_loader_show_themselves(cache: fb.Cache, batch: LoadedBatch):
    html = batch._repr_html_()
    assert html == show_batch(dict(batch))._repr_html_()
    assert len(pictures(html)) == 4
    assert repr(batch) == repr(dict(batch))
    assert isinstance(batch, dict)
    changed = Loader(cache, global_batch_size=4, threads=0, transform=lambda batch, coins: batch | {"more": 1})
    assert "more" in text_of(next(iter(changed))._repr_html_())
    own = Loader(cache, global_batch_size=4, threads=0, transform=lambda batch, coins: Own(batch))
    assert type(next(iter(own))) is Own
    for one in next(iter(Loader(cache, global_batch_size=4, micro_batches=2, threads=0))):
        assert len(pictures(one._repr_html_())) == 2


class Own(dict):
    pass


def test_torch_takes_a_batch_for_a_dict(batch: LoadedBatch):
    doubled = tree_map(lambda value: value * 2, batch)
    assert type(doubled) is LoadedBatch
    assert {name: value.tolist() for name, value in doubled.items()} == {
        name: (value * 2).tolist() for name, value in batch.items()
    }
    paths = tree_flatten_with_path(batch)[0]
    assert [(path[0].key, value is batch[path[0].key]) for path, value in paths] == [(name, True) for name in batch]
    stacked = default_collate([batch, batch])
    assert stacked["tokens"].shape == (2, *batch["tokens"].shape)
    compiled = torch.compile(_step, fullgraph=True, backend="eager")
    (total, doubled) = compiled(batch)
    assert total == _step(batch)[0]
    assert type(doubled) is LoadedBatch

    class Model(torch.nn.Module):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return batch["tokens"] + batch["positions"]

    exported = torch.export.export(Model(), (batch,)).module()
    assert torch.equal(exported(batch), batch["tokens"] + batch["positions"])


def _step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    total = sum(value.sum() for value in batch.values())
    return total, tree_map(lambda value: value * 2, batch)


def test_a_batch_is_saved_as_a_dict_that_needs_no_forebay(batch: LoadedBatch, tmp_path):
    pickled = pickle.dumps(batch)
    assert b"forebay" not in pickled
    torch.save(batch, tmp_path / "batch.pt")
    for again in (pickle.loads(pickled), torch.load(tmp_path / "batch.pt", weights_only=True), copy.deepcopy(batch)):
        assert list(again) == list(batch)
        assert all(torch.equal(again[name], batch[name]) for name in batch)
    shallow = copy.copy(batch)
    assert type(shallow) is LoadedBatch
    assert all(shallow[name] is batch[name] for name in batch)


def test_trainers_move_a_batch_as_a_batch(batch: LoadedBatch):
    accelerate = pytest.importorskip("accelerate")
    fabric = pytest.importorskip("lightning.fabric.utilities.apply_func")
    meta = torch.device("meta")
    for moved in (
        accelerate.utils.send_to_device(batch, meta),
        fabric.move_data_to_device(batch, meta),
        *torch.distributed.utils._recursive_to(batch, meta, use_side_stream_for_tensor_copies=False),
    ):
        assert type(moved) is LoadedBatch
        assert {name: value.device for name, value in moved.items()} == dict.fromkeys(batch, meta)


@pytest.mark.parametrize(
    "seq_lens", [torch.tensor([[9]]), torch.tensor([[-1]]), torch.tensor([[0.5]]), torch.zeros(3, 1), 7]
)  # fmt: skip
def test_lengths_that_are_not_those_of_rows_have_no_bars(seq_lens: object):
    html = show_batch({"tokens": torch.zeros(1, 4), "seq_lens": seq_lens})._repr_html_()
    assert pictures(html) == []
    assert "float32 [1, 4]" in text_of(html)


def test_names_and_values_of_a_batch_are_only_text():
    class Odd:
        pass

    Odd.__name__ = NASTY
    html = show_batch({NASTY: torch.zeros(2), "other": Odd(), "array": np.zeros((1, 2), np.uint8)})._repr_html_()
    assert NASTY in text_of(html)
    assert text_of(html).count(NASTY) == 2
    assert "uint8 [1, 2]" in text_of(html)
    assert repr(show_batch({})) == "an empty batch"
    text_of(show_batch({})._repr_html_())


@pytest.mark.parametrize(
    "mask",
    [
        document_block_mask(SEQ_LENS, 6, block_size=2),
        document_block_mask([[150, 30]], 190, kind="bidirectional", block_size=16),
        image_block_mask([[0, 16, 64, 32]], (64, 64), 8, block_size=16),
    ],
    ids=["causal", "bidirectional", "image"],
)
def test_a_block_mask_is_drawn_as_attention_sees_it(mask):
    length = mask.seq_lengths[0]
    at = torch.arange(length)
    seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), at[:, None], at[None]).expand(length, length).numpy()
    (picture,) = pictures(show_mask(mask)._repr_html_())
    assert np.array_equal(is_color(picture, UNSEEN), ~seen)
    side = mask.BLOCK_SIZE[0]
    for top in range(0, length - side + 1, side):
        for left in range(0, length - side + 1, side):
            block = (slice(top, top + side), slice(left, left + side))
            assert is_color(picture[block], SEEN_WHOLE).all() == seen[block].all()
    text = text_of(show_mask(mask)._repr_html_())
    blocks = -(-length // side)
    (count,) = [line for line in text if " of " in line]
    listed = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert count == f"{listed:,} of {len(mask.kv_num_blocks) * blocks**2:,}"


def test_a_long_mask_is_sampled():
    html = show_mask(causal_block_mask(100_000))._repr_html_()
    (picture,) = pictures(html)
    assert picture.shape[0] <= 200
    assert len(html) < 20_000
    assert np.array_equal(is_color(picture, UNSEEN), np.triu(np.ones(picture.shape[:2], bool), 1))


def test_a_notebook_draws_block_masks_unless_somebody_else_does(monkeypatch):
    """IPython's formatter, as far as it is called: `for_type_by_name` returns what is registered."""
    registered = {}

    def for_type_by_name(module, name, draw=None):
        found = registered.get((module, name))
        if draw is not None:
            registered[module, name] = draw
        return found

    formatter = SimpleNamespace(for_type_by_name=for_type_by_name)
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": formatter}))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    show_masks_in_notebooks()
    mask = causal_block_mask(64)
    ((name, draw),) = registered.items()
    assert name == (type(mask).__module__, type(mask).__name__)
    assert draw(mask) == show_mask(mask)._repr_html_()
    show_masks_in_notebooks()
    assert registered == {name: draw}
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    show_masks_in_notebooks()  # a library that only imported it
