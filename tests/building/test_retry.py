"""I/O errors that pass: the builder's own thread waits for them as workers do, and never hides why a build ended."""

import errno
import os

import pytest
from tests.helpers.obedient_recipes import NOTES, ObedientRecipe, orders, write_orders

import forebay as fb
from forebay.cache.heartbeat import Heartbeat, read_builders
from forebay.errors import BuildFailed
from forebay.format import layout
from forebay.store import retries


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch, tmp_path):
    monkeypatch.setattr(retries, "DISK", retries.RetryPolicy(retries=3, first_wait=0))
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    (tmp_path / "notes").mkdir()


class HiccupStore(fb.LocalStore):
    """Refuses what it is asked about some keys, a few times each."""

    def __init__(self, path, part, code=errno.ESTALE, times=2):
        super().__init__(path)
        self.part, self.code, self.times = part, code, times
        self.seen = {}

    def hiccup(self, what, key):
        count = self.seen[what, key] = self.seen.get((what, key), 0) + 1
        if self.part in key and count <= self.times:
            raise OSError(self.code, os.strerror(self.code), key)

    def create(self, key, data, **options):
        self.hiccup("create", key)
        return super().create(key, data, **options)

    def delete(self, key, **options):
        self.hiccup("delete", key)
        super().delete(key, **options)

    def read(self, key, start=0, stop=None):
        self.hiccup("read", key)
        return super().read(key, start, stop)

    def replace(self, key, data, **options):
        self.hiccup("replace", key)
        return super().replace(key, data, **options)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EBUSY])
@pytest.mark.parametrize("part", ["claims/", "generations/"])
def test_a_build_survives_hiccups_of_claims_and_generations(tmp_path, part, code):
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(3)))
    store = HiccupStore(tmp_path / "cache", part, code)
    assert fb.build(store, source, ObedientRecipe(), workers=0).built == 3
    assert fb.status(tmp_path / "cache", source=source).claims == ()
    assert store.seen


def test_tidying_up_does_not_hide_why_a_build_ended(tmp_path):
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(3, c1="raise ValueError 9")))

    class Untidy(fb.LocalStore):
        def leftovers(self):
            raise OSError(errno.EIO, "the disk does not answer")

    with pytest.raises(BuildFailed, match="ValueError"):
        fb.build(Untidy(tmp_path / "cache"), source, ObedientRecipe(), workers=0)


def test_a_beat_that_cannot_be_written_does_not_stop_the_next(tmp_path):
    store = HiccupStore(tmp_path / "cache", "builders/", times=2)
    with Heartbeat(store) as heart:
        heart.beat()
        assert read_builders(fb.LocalStore(tmp_path / "cache")) == {}
        heart.beat()
        assert [one.beat for one in read_builders(fb.LocalStore(tmp_path / "cache")).values()] == [3]


def test_while_another_machine_holds_a_chunk_it_is_named(tmp_path):
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(3)))
    root, seen = tmp_path / "cache", []
    fb.build(root, source, ObedientRecipe(), workers=0, end_chunk=1)
    claim = root / layout.claim(fb.open_cache(root).generation.folder("obedient"), 2)
    claim.parent.mkdir(parents=True, exist_ok=True)
    claim.write_text('{"owner":"another-1-1","host":"node-b","pid":1}')
    fb.build(root, source, ObedientRecipe(), workers=0, lease_seconds=0.6, on_progress=seen.append)
    assert ("waiting", ("node-b",)) in {(progress.phase, progress.waiting_for) for progress in seen}


def test_an_interrupted_repair_is_stopped_and_not_a_list_of_failures(tmp_path):
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(3)))
    root = tmp_path / "cache"
    fb.build(root, source, ObedientRecipe(), workers=0)
    for path in (root / "layers").glob("*/00000[12].safetensors"):
        path.unlink()

    def stop(progress):
        if progress.phase == "building":
            raise KeyboardInterrupt

    with pytest.raises(fb.errors.BuildStopped, match="published and safe"):
        fb.repair(root, source=source, recipe=ObedientRecipe(), workers=0, on_progress=stop)
    assert not isinstance(fb.errors.BuildStopped("root", 1, 2), Exception)
