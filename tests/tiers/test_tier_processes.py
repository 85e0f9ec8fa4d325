"""Many processes and one tier: forked, spawned, killed at any moment, with maps of different sizes."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from tests.builders import wait_until
from tests.tiers.pictures import RECIPE, assert_same_rows, fresh_rows, write_picture, write_pictures
from tests.tiers.processes import FORK, SPAWN, run

import forebay as fb
from forebay.errors import ForebayError
from forebay.tiers import CachedImages, TierWarning, clear_tier, summarize_tier, verify_tier
from forebay.tiers.lmdb_tier import open_tier
from forebay.tiers.tier_value import made_by

torch = pytest.importorskip("torch")
# More rows than the writers that are killed come to write; the pad colour changes keys, and no pixel of opaque images.
RECIPES = [fb.ImageRecipe(size=size, pad_color=(red, 0, 0), tags=()) for size in (8, 16, 24) for red in range(100)]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> fb.Source:
    return fb.sources.images(write_pictures(tmp_path_factory.mktemp("of-processes") / "pictures"))


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def started() -> Iterator[list]:
    """Processes that are killed at the end, whatever happened."""
    processes: list = []
    yield processes
    for process in processes:
        process.kill()
        process.join()


def read_all_and_leave(images: CachedImages, hits: int) -> None:
    """What a worker does: it closes nothing when it ends."""
    assert_same_rows(images.read(range(len(images))), fresh_rows(images.source, images.recipe))
    assert images.statistics().l2_hits == hits
    assert images.statistics().l1_hits == 0  # an L1 belongs to one process


@pytest.mark.parametrize("context", [FORK, SPAWN], ids=["fork", "spawn"])
def test_a_process_that_is_handed_the_images_opens_the_tier_anew_and_leaves_all_written(source, tier, context):
    with CachedImages(source, RECIPE, l2=tier) as images:
        images.read([0, 1, 2])  # the tier is open here, before the other process begins
        images.flush()
        run(context, read_all_and_leave, images, 3)
        assert images.statistics().misses == 3
        assert_same_rows(images.read(range(12)), fresh_rows(source, images.recipe))
        assert images.statistics().l2_hits == 9
    run(FORK, read_all_and_leave, images, 12)


def test_forks_in_the_middle_of_reading_and_writing_harm_neither_side(source, tier):
    images = CachedImages(source, RECIPE, l1=0, l2=tier)
    images.read(range(12))
    images.flush()
    stop = threading.Event()
    failed: list[BaseException] = []
    other = CachedImages(source, fb.ImageRecipe(size=20), l1=0, l2=tier)

    def keep_busy() -> None:
        try:
            while not stop.is_set():
                images.read(range(12))
                clear_tier(str(tier))
                other.read(range(12))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        for _ in range(5):
            run(FORK, rows_are_right, images)
    finally:
        stop.set()
        thread.join()
    assert not failed
    images.close()
    other.close()
    assert verify_tier(str(tier)).sound


def test_after_a_fork_others_still_see_that_the_parent_reads(tier):
    """A reader that nobody sees reads pages that a writer has taken for something else."""
    opened = open_tier(str(tier))
    for _ in range(3):
        with opened.environment.snapshot() as kept:  # beyond its end, as the traceback of an error keeps it
            seen = subprocess.run([sys.executable, "-c", READERS, tier], capture_output=True, text=True, check=True)
        assert re.search(rf"^ *{os.getpid()} \w+ \d+$", seen.stdout, re.MULTILINE), seen.stdout
        run(FORK, int)
    opened.close()
    del kept


READERS = "import lmdb, sys; print(lmdb.open(sys.argv[1]).readers())"


def rows_are_right(images: CachedImages) -> None:
    assert_same_rows(images.read(range(len(images))), fresh_rows(images.source, images.recipe))


def rows_as_they_are(rows: list) -> list:
    return rows


def test_workers_of_a_data_loader_share_the_tier(source, tier):
    """The second epoch finds what any worker made in the first; rows are those of decoding afresh in both."""
    images = CachedImages(source, RECIPE, l2=tier)
    expected = fresh_rows(source, images.recipe)
    for _ in range(2):
        loader = torch.utils.data.DataLoader(images, batch_size=3, num_workers=2, collate_fn=rows_as_they_are)
        assert_same_rows([row for batch in loader for row in batch], expected)
        assert summarize_tier(str(tier)).values == 12
    assert images.statistics().l2_hits + images.statistics().misses == 0  # all was done by workers
    run(FORK, read_all_and_leave, images, 12)
    images.close()


def test_two_processes_that_write_the_same_rows_at_once_leave_each_of_them_once(source, tier, started):
    barrier = FORK.Barrier(2)
    images = CachedImages(source, RECIPE, l1=0, l2=tier)
    started += [FORK.Process(target=read_behind, args=(barrier, images)) for _ in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
        assert process.exitcode == 0
    report = verify_tier(str(tier))
    assert (report.sound, report.values) == (True, 12)
    read_all_and_leave(images, 12)
    images.close()


def read_behind(barrier, images: CachedImages) -> None:
    barrier.wait()
    rows_are_right(images)


def write_until_killed(source: fb.Source, tier: Path, seed: int) -> None:
    for recipe in random.Random(seed).sample(RECIPES, len(RECIPES)):
        with CachedImages(source, recipe, l1=0, l2=tier, queue_bytes="20kB") as images:
            for index in random.Random(seed).sample(range(len(images)), len(images)):
                images[index]


def kill_writers(source: fb.Source, tier: Path, started: list, kills: int) -> None:
    dice = random.Random(kills)
    started += [FORK.Process(target=write_until_killed, args=(source, tier, seed)) for seed in range(2)]
    for process in started:
        process.start()
    for number in range(kills):
        time.sleep(dice.uniform(0.0, 0.25))
        victim = dice.randrange(2)
        assert started[victim].is_alive()
        started[victim].kill()
        started[victim].join()
        assert started[victim].exitcode == -signal.SIGKILL
        started[victim] = FORK.Process(target=write_until_killed, args=(source, tier, 2 + number))
        started[victim].start()
    wait_until(lambda: _has_rows(tier), what="no writer wrote a row")
    for process in started:
        process.kill()
        process.join()


def _has_rows(tier: Path) -> bool:
    with contextlib.suppress(ForebayError, OSError):
        return summarize_tier(str(tier)).values > 0
    return False


def check_after_kills(source: fb.Source, tier: Path) -> int:
    """How many rows are there; every one of them is right, and the tier goes on."""
    report = verify_tier(str(tier))
    assert report.sound, report.bad
    kept = {share.fingerprint for share in summarize_tier(str(tier)).recipes}
    expected = {size: fresh_rows(source, fb.ImageRecipe(size=size, tags=())) for size in (8, 16, 24)}
    hits = 0
    for recipe in RECIPES:
        if made_by(recipe) in kept:
            with CachedImages(source, recipe, l2=tier) as images:
                assert_same_rows(images.read(range(len(images))), expected[recipe.size])
                assert not images.statistics().bad
                hits += images.statistics().l2_hits
    assert hits == report.values
    assert summarize_tier(str(tier)).values == len(kept) * 12
    return hits


def test_every_value_is_right_after_writers_were_killed_at_random(source, tier, started, record_property):
    kill_writers(source, tier, started, kills=8)
    hits = check_after_kills(source, tier)
    record_property("told", f"10 writers killed at random with {hits} of {len(RECIPES) * 12} rows kept; all are right")
    assert 0 < hits < len(RECIPES) * 12


@pytest.mark.long
def test_every_value_is_right_after_two_hundred_kills(source, tier, started):
    for _ in range(10):
        kill_writers(source, tier, started, kills=20)
        started.clear()
    assert check_after_kills(source, tier) > 20


def fill_the_table_of_readers_and_die(tier: Path) -> None:
    environment = lmdb.open(str(tier), map_size=1 << 26)
    kept = []
    try:
        while True:
            kept.append(environment.begin())
    except lmdb.ReadersFullError:
        os.kill(os.getpid(), signal.SIGKILL)


def test_readers_that_were_killed_do_not_stand_in_the_way(source, tier):
    with CachedImages(source, RECIPE, l1=0, l2=tier) as images:
        images.read(range(12))
        images.flush()
        process = SPAWN.Process(target=fill_the_table_of_readers_and_die, args=(tier,))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        images.read(range(12))
        assert (images.statistics().l2_hits, images.statistics().lmdb_errors) == (12, {})


def test_a_map_that_another_process_made_larger_is_taken_over(tmp_path, tier):
    for number in range(12):
        write_picture(tmp_path / "large" / f"{number}.png", number, (448, 448))
    source = fb.sources.images(tmp_path / "large")
    recipe = fb.ImageRecipe(tags=())
    with CachedImages(source, recipe, l1=0, l2=tier, max_bytes="2MB") as images:
        images[0]
        images.flush()
        run(FORK, rows_are_right, CachedImages(source, recipe, l2=tier))
        assert (tier / "data.mdb").stat().st_size > 7_000_000
        assert_same_rows(images.read(range(12)), fresh_rows(source, recipe))
        assert images.statistics().l2_hits == 12
        assert summarize_tier(str(tier)).map_bytes > 7_000_000
        other = CachedImages(source, fb.ImageRecipe(tags=(), size=400), l2=tier, max_bytes="2MB")
        other[0]
        with pytest.warns(TierWarning, match="reached 2,000,000 bytes"):
            other.close()


def test_rows_of_a_batch_are_what_the_collate_of_images_takes(source, tier):
    from forebay.torch import ImageBatch  # noqa: PLC0415  # only this test waits for it

    images = CachedImages(source, RECIPE, l2=tier)
    collate = ImageBatch(images.recipe)
    loader = torch.utils.data.DataLoader(images, batch_size=12, num_workers=2, collate_fn=collate)
    [batch] = loader
    expected = collate(fresh_rows(source, images.recipe))
    for name, tensor in expected.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(batch[name], tensor), name
    assert batch["pixels"].shape == (12, 3, 32, 32)
    assert np.array_equal(batch["box"], [row["box"] for row in images.read(range(12))])
    images.close()
