"""Memory of batches: used again, but never while anybody holds a tensor in it."""

import contextlib
import gc
import itertools
import os
import random
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.token_caches import token_cache

import forebay as fb
from forebay import compiled
from forebay.torch import Loader
from forebay.torch.batches import Buffers, wrap

SHAPE, LONG = (64, 64), np.dtype(np.int64)
BYTES = 64 * 64 * 8


@pytest.fixture(autouse=True, params=["compiled", "numpy"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(compiled, "native", None)


def lend(buffers: Buffers) -> torch.Tensor:
    return wrap(buffers.empty(SHAPE, LONG))


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[3:5].T,
        lambda tensor: tensor.view(-1)[::7],
        lambda tensor: tensor.numpy()[1],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: memoryview(tensor.numpy()),
    ],
)
def test_memory_is_used_again_only_when_nobody_holds_it(hold: object) -> None:
    buffers = Buffers(4 * BYTES)
    tensor = lend(buffers)
    address, held = tensor.data_ptr(), hold(tensor)  # type: ignore[operator]
    del tensor
    assert lend(buffers).data_ptr() != address
    del held
    others = [lend(buffers) for _ in range(2)]
    assert address in [other.data_ptr() for other in others]


def test_no_more_memory_is_kept_than_asked_for() -> None:
    buffers = Buffers(2 * BYTES)
    tensors = [lend(buffers) for _ in range(5)]
    addresses = {tensor.data_ptr() for tensor in tensors}
    assert len(addresses) == 5
    del tensors
    assert buffers.free_bytes == 2 * BYTES


def test_memory_of_all_shapes_together_is_bounded() -> None:
    buffers = Buffers(3 * BYTES)
    for side in range(64, 128):
        wrap(buffers.empty((side, side), LONG))
        assert buffers.free_bytes <= 3 * BYTES
    newest = wrap(buffers.empty((100, 64), LONG))
    address = newest.data_ptr()
    del newest
    for _ in range(3):
        assert wrap(buffers.empty((100, 64), LONG)).data_ptr() == address, "the size in use stays"


def test_tensors_outlive_their_buffers() -> None:
    buffers = Buffers(2 * BYTES)
    tensor = lend(buffers)
    tensor.fill_(7)
    del buffers
    assert int(tensor.sum()) == 7 * 64 * 64


def test_batches_that_are_kept_keep_their_values(tmp_path: Path) -> None:
    cache = fb.open_cache(token_cache(tmp_path, 120, sequence_length=1024, chunk_rows=40))
    loader = Loader(cache, global_batch_size=4, prefetch=6)
    kept = [[{name: values for name, values in batch.items()} for batch in loader] for _ in range(2)]
    again = Loader(cache, global_batch_size=4, threads=0)
    for epoch in kept:
        for batch, expected in zip(epoch, again, strict=True):
            assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_batches_that_are_dropped_give_their_memory_to_later_ones(tmp_path: Path) -> None:
    cache = fb.open_cache(token_cache(tmp_path, 120, sequence_length=1024, chunk_rows=40))
    one = Loader(cache, global_batch_size=4, prefetch=3)
    addresses = [batch["tokens"].data_ptr() for _ in range(3) for batch in one]
    assert len(addresses) == 90
    assert len(set(addresses)) < 30


@pytest.mark.parametrize("options", [{}, {"derive": "device"}, {"max_documents": 9}, {"labels": None, "derive": ()}])
def test_batches_in_arrays_of_somebody_else_are_the_same(tmp_path: Path, options: dict[str, object]) -> None:
    cache = fb.open_cache(token_cache(tmp_path, 30))
    loaders = [Loader(cache, global_batch_size=4, prefetch=7, drop_last=False, **options) for _ in range(2)]
    loaders[1]._maker.buffers.pool = None  # as with a GPU, where torch has the memory
    for mine, other in zip(*loaders, strict=True):
        assert list(mine) == list(other)
        assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_with_a_gpu_batches_lie_in_pinned_memory(tmp_path: Path) -> None:
    cache = fb.open_cache(token_cache(tmp_path, 20))
    batch = next(iter(Loader(cache, global_batch_size=4, derive=["positions", "cu_seqlens"])))
    assert all(values.is_pinned() for values in batch.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_waits_for_copies_of_slices_that_are_under_way() -> None:
    buffers, wide = Buffers(4 * BYTES, pinned=True), (1 << 12, 1 << 10)
    busy = torch.randn(8192, 8192, device="cuda")
    for number in range(4):
        held = buffers.empty(wide, LONG)
        held[:] = number
        for _ in range(8):
            busy = busy @ busy / 8192  # the copy waits for this, and the next round does not
        copied = wrap(held)[1:].to("cuda", non_blocking=True)
        del held
        buffers.empty(wide, LONG)[:] = -1
        assert copied.unique().tolist() == [number]


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_a_cache_maps_and_decodes_goes_with_its_last_loader(tmp_path: Path, codec: str) -> None:
    root = token_cache(tmp_path, 40, codec=codec)
    gc.disable()  # a collector comes late: until then, every cache that was opened would keep its decoded blocks
    try:
        cache = fb.open_cache(root)
        loader = Loader(cache, global_batch_size=4, growth="within")
        assert len(list(loader)) == 10
        kept = [weakref.ref(each) for each in (cache, loader, cache._blocks, *cache._maps.values())]
        del cache, loader
        assert [each() for each in kept] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
def test_batches_of_two_loaders_that_are_kept_at_random_keep_their_values(tmp_path: Path, threads: int) -> None:
    """Views, storages and arrays are kept while the loaders go on, one raises, and both are gone."""
    root = token_cache(tmp_path, 240, sequence_length=1024, chunk_rows=40)
    choose = random.Random(threads)
    views = (lambda values: values, lambda values: values[1:], lambda values: values.numpy().T, lambda values: values.T)
    kept: list[tuple[object, np.ndarray]] = []

    def failing(batch: dict[str, torch.Tensor], coins: object) -> dict[str, torch.Tensor]:
        if next(calls) == 40:
            raise OSError("in the middle")
        return batch

    for turn in range(4):
        calls = itertools.count()
        loaders = [
            Loader(
                fb.open_cache(root), global_batch_size=4, seed=seed, threads=threads, prefetch=6, transform=transform
            )
            for seed, transform in ((0, None), (1, failing))
        ]
        with contextlib.suppress(OSError):
            for pair in zip(*(loader.forever(50) for loader in loaders), strict=True):
                for batch in pair:
                    values = choose.choice(views)(batch[choose.choice(["tokens", "labels", "positions"])])
                    if choose.random() < 0.3:
                        kept.append((values, np.asarray(values).copy()))
                if kept and choose.random() < 0.2:
                    kept.pop(choose.randrange(len(kept)))
                del batch, values, pair
        del loaders
        if turn % 2:
            gc.collect()
        choose.shuffle(kept)
    assert len(kept) > 10
    assert all(np.array_equal(np.asarray(values), copy) for values, copy in kept)


def test_batches_that_a_forked_process_frees_stay_those_of_its_parent(tmp_path: Path) -> None:
    root = token_cache(tmp_path, 120, sequence_length=1024, chunk_rows=40)
    loader = Loader(fb.open_cache(root), global_batch_size=4, threads=0)
    batches = iter(loader)
    kept = [next(batches) for _ in range(5)]
    copies = [batch["labels"].clone() for batch in kept]
    if not (child := os.fork()):
        kept.clear()  # the memory of these goes to the child's own batches
        wrong = 0
        for batch in itertools.islice(batches, 12):
            wrong += int(
                (batch["labels"][:, :-1] != batch["tokens"][:, 1:]).logical_and(batch["labels"][:, :-1] >= 0).sum()
            )
            for values in batch.values():
                values.fill_(-5)
        os._exit(3 if wrong else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    rest = [batch["labels"].clone() for batch in batches]
    assert all(torch.equal(batch["labels"], copy) for batch, copy in zip(kept, copies, strict=True))
    expected = Loader(fb.open_cache(root), global_batch_size=4, threads=0)
    assert all(torch.equal(mine, other["labels"]) for mine, other in zip([*copies, *rest], expected, strict=True))
