"""L2 between processes: forks, kills, growth, limits, a damaged file after a reboot."""

import os
import random
import signal
import time
import warnings
from pathlib import Path

import lmdb
import numpy as np
import pytest
from tests.row_cache.pictures import RECIPE, assert_same_rows, fresh_rows, write_picture, write_pictures
from tests.row_cache.processes import FORK, SPAWN, run

import forebay as fb
from forebay.row_cache import CachedImages, RowCacheWarning

torch = pytest.importorskip("torch")
LARGE = fb.ImageRecipe(size=256, tags=())  # 192 KiB a row


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> fb.Source:
    return fb.sources.images(write_pictures(tmp_path_factory.mktemp("row-file") / "pictures"))


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> fb.Source:
    folder = tmp_path_factory.mktemp("large-rows")
    for number in range(24):
        write_picture(folder / f"{number:03d}.bmp", number, (256, 256))
    return fb.sources.images(folder)


@pytest.fixture
def l2(tmp_path: Path) -> Path:
    return tmp_path / "rows"


def read_and_leave(images: CachedImages, l2_hits: int) -> None:
    """A worker: it closes nothing when it ends."""
    assert_same_rows(images.read(range(len(images))), fresh_rows(images.source, images.recipe))
    assert (images.statistics().l2_hits, images.statistics().l1_hits) == (l2_hits, 0)


@pytest.mark.parametrize("context", [FORK, SPAWN], ids=["fork", "spawn"])
def test_another_process_opens_l2_anew_and_its_rows_are_stored(source, l2, context):
    with CachedImages(source, RECIPE, l2=l2) as images:
        images.read([0, 1, 2])  # L2 is open here before the other process begins
        run(context, read_and_leave, images, 3)
        assert images.statistics().misses == 3
        assert_same_rows(images.read(range(12)), fresh_rows(source, images.recipe))
        assert images.statistics().l2_hits == 9


def as_list(rows: list) -> list:
    return rows


def test_data_loader_workers_share_l2(source, l2):
    images = CachedImages(source, RECIPE, l2=l2)
    expected = fresh_rows(source, images.recipe)
    for _ in range(2):
        loader = torch.utils.data.DataLoader(images, batch_size=3, num_workers=2, collate_fn=as_list)
        assert_same_rows([row for batch in loader for row in batch], expected)
    run(FORK, read_and_leave, images, 12)
    images.close()


def test_rows_of_a_batch_are_accepted_by_image_batch(source, l2):
    from forebay.torch import ImageBatch  # noqa: PLC0415  # slow import, for this test only

    images = CachedImages(source, RECIPE, l2=l2)
    collate = ImageBatch(images.recipe)
    [batch] = torch.utils.data.DataLoader(images, batch_size=12, num_workers=2, collate_fn=collate)
    expected = collate(fresh_rows(source, images.recipe))
    for name, tensor in expected.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(batch[name], tensor), name
    images.close()


def write_until_killed(source: fb.Source, l2: Path, seed: int) -> None:
    dice = random.Random(seed)
    while True:
        recipe = fb.ImageRecipe(size=dice.choice((8, 16, 24)), pad_color=(dice.randrange(100), 0, 0), tags=())
        with CachedImages(source, recipe, l1=0, l2=l2) as images:
            images.read(dice.sample(range(len(images)), len(images)))


@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=pytest.mark.long)])
def test_rows_are_right_after_writers_were_killed_at_random(source, l2, kills):
    dice = random.Random(kills)
    for number in range(kills):
        writers = [FORK.Process(target=write_until_killed, args=(source, l2, 2 * number + one)) for one in range(2)]
        for writer in writers:
            writer.start()
        time.sleep(dice.uniform(0.1, 0.4))
        for writer in writers:
            writer.kill()
            writer.join()
            assert writer.exitcode == -signal.SIGKILL
    hits = 0
    for size in (8, 16, 24):
        expected = fresh_rows(source, fb.ImageRecipe(size=size, tags=()))
        for red in range(100):
            with CachedImages(source, fb.ImageRecipe(size=size, pad_color=(red, 0, 0), tags=()), l2=l2) as images:
                assert_same_rows(images.read(range(12)), expected)
                assert not images.statistics().bad
                hits += images.statistics().l2_hits
    assert hits > 0


def exhaust_readers_and_die(l2: Path) -> None:
    environment = lmdb.open(str(l2), map_size=1 << 26)
    transactions = []
    try:
        while True:
            transactions.append(environment.begin())
    except lmdb.ReadersFullError:
        os.kill(os.getpid(), signal.SIGKILL)


def test_slots_of_killed_readers_are_reused(source, l2):
    with CachedImages(source, RECIPE, l1=0, l2=l2) as images:
        images.fill()
        process = SPAWN.Process(target=exhaust_readers_and_die, args=(l2,))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        images.read(range(12))
        assert (images.statistics().l2_hits, images.statistics().l2_off) == (12, "")


def test_the_map_grows_and_other_processes_follow(large, l2, monkeypatch):
    monkeypatch.setattr("forebay.row_cache.lmdb_file.FIRST_MAP_BYTES", 1 << 20)
    with CachedImages(large, LARGE, l1=0, l2=l2) as images:
        images[0]
        run(FORK, read_and_leave, CachedImages(large, LARGE, l2=l2), 1)  # it makes the map larger than ours
        assert_same_rows(images.read(range(24)), fresh_rows(large, LARGE))
        assert images.statistics().l2_hits == 24


def test_at_its_limit_writing_ends_with_one_warning_and_rows_stay_right(large, l2):
    expected = fresh_rows(large, LARGE)
    with CachedImages(large, LARGE, l1=0, l2=l2, max_bytes="2MB") as images:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(3):
                assert_same_rows([images[index] for index in range(24)], expected)
        [message] = [str(one.message) for one in warned if issubclass(one.category, RowCacheWarning)]
        assert "has reached 2,000,000 bytes" in message
        assert (l2 / "data.mdb").stat().st_size <= 2_000_000
        assert images.statistics().l2_off


def damage_tree(l2: Path) -> None:
    data = bytearray((l2 / "data.mdb").read_bytes())
    for page in range(2, len(data) // 4096):
        data[4096 * page : 4096 * page + 32] = np.random.default_rng(page).bytes(32)
    (l2 / "data.mdb").write_bytes(data)


@pytest.mark.parametrize("damage", [damage_tree, lambda l2: os.truncate(l2 / "data.mdb", 4096 * 3)])
def test_a_file_damaged_by_a_power_cut_is_deleted_at_the_next_boot_and_its_rows_are_made_again(source, l2, damage):
    with CachedImages(source, RECIPE, l2=l2) as images:
        images.fill()
    damage(l2)
    (l2 / "users").write_bytes(b"the boot before")
    with CachedImages(source, RECIPE, l2=l2) as images:
        assert_same_rows(images.read(range(12)), fresh_rows(source, images.recipe))
        assert images.statistics().misses == 12
    with CachedImages(source, RECIPE, l2=l2) as images:
        images.read(range(12))
        assert images.statistics().l2_hits == 12


def test_a_file_that_shrinks_while_it_is_open_turns_l2_off(source, l2):
    with CachedImages(source, RECIPE, l1=0, l2=l2) as images:
        images.fill()
        os.truncate(l2 / "data.mdb", 4096 * 3)
        with pytest.warns(RowCacheWarning, match="was cut to"):
            assert_same_rows(images.read(range(12)), fresh_rows(source, images.recipe))
