"""Chunks that fail are tried again on another slot; a slot on which every chunk fails gets no more."""

from collections import Counter

import pytest
from tests.helpers.builders import chunk_digests
from tests.helpers.obedient_recipes import NOTES, ObedientRecipe, orders, write_orders

import forebay as fb
from forebay.building import run
from forebay.engine.base import Died, EngineUsage, Failed, attempt_chunk
from forebay.errors import BuildFailed, BuildStopped

GONE = "FileNotFoundError: [Errno 2] No such file or directory: 'source.txt'"


class ManySlots:
    """An engine with several slots, all of them in this process; `acts` replaces what some of them do."""

    def __init__(self, count, acts=None, starting=0):
        self.count, self.acts, self.starting = count, acts or {}, starting
        self.tried, self._task, self._submitted = Counter(), None, {}

    def capacity(self):
        return self.count

    def start(self, task, slots):
        self._task = task

    def idle(self):
        return [] if self.starting else [slot for slot in range(self.count) if slot not in self._submitted]

    def submit(self, slot, chunk):
        self._submitted[slot] = chunk

    def poll(self, timeout):
        """Every slot that fails, and one of those that work: failing is quicker."""
        failing = [slot for slot in self._submitted if slot in self.acts]
        working = [slot for slot in self._submitted if slot not in failing][:1]
        return [self._event(slot) for slot in [*failing, *working]]

    def _event(self, slot):
        chunk = self._submitted.pop(slot)
        self.tried[slot] += 1
        act = self.acts.get(slot)
        return (act(chunk) if act else None) or attempt_chunk(self._task, chunk)

    def resize(self, slots):
        pass

    def usage(self):
        return EngineUsage(workers=self.count, elsewhere=True, waiting="the cluster is full" if self.starting else "")

    def stop(self):
        self._submitted.clear()


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv(NOTES, str(tmp_path))
    return fb.sources.lines(write_orders(tmp_path / "source.txt", orders(24)))


def missing(chunk):
    return Failed(chunk, "io", GONE)


def test_a_slot_that_fails_three_chunks_in_a_row_gets_no_more_and_all_chunks_are_made(tmp_path, source):
    engine = ManySlots(3, {2: missing})
    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=engine)
    assert (report.built, report.failed) == (24, {})
    assert engine.tried[2] == 3
    fb.build(tmp_path / "alone", source, ObedientRecipe(), workers=0)
    assert chunk_digests(tmp_path / "cache") == chunk_digests(tmp_path / "alone")


def test_a_chunk_that_fails_on_every_slot_is_given_up_after_three_tries(tmp_path, source):
    def fails_at_5(chunk):
        return missing(chunk) if chunk == 5 else None

    with pytest.raises(BuildFailed, match=r"(?s)chunk 5: .*No such file.*3 tries") as caught:
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=ManySlots(2, dict.fromkeys((0, 1), fails_at_5)))
    assert list(caught.value.facts["failed"]) == [5]
    assert len(chunk_digests(tmp_path / "cache")) == 23


def test_where_every_slot_fails_the_build_ends(tmp_path, source):
    with pytest.raises(BuildFailed, match=r"(?s)20 chunk\(s\).*No such file"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=ManySlots(2, dict.fromkeys((0, 1), missing)))


def test_a_chunk_that_kills_workers_is_given_up_after_three(tmp_path, source):
    def dies(chunk):
        return Died(chunk, "actor", "died") if chunk == 5 else None

    with pytest.raises(BuildFailed, match="chunk 5: a worker was lost: died") as caught:
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=ManySlots(5, dict.fromkeys(range(5), dies)))
    assert list(caught.value.facts["failed"]) == [5]


def test_a_chunk_that_is_lost_with_its_node_is_not_tried_in_vain(tmp_path, source):
    lost = Counter()

    def dies(chunk):
        lost[chunk] += 1
        return Died(None, "actor 1", "was lost", (chunk,)) if lost[chunk] <= 5 else None

    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=ManySlots(1, {0: dies}))
    assert (report.built, report.failed, len(report.deaths)) == (24, {}, 5 * 24)


def test_a_notice_says_what_workers_wait_for(tmp_path, source, monkeypatch):
    monkeypatch.setattr(run, "STALL_SECONDS", 0.0)
    notes = []

    def stop(progress):
        if "no worker has been ready" in progress.note:
            notes.append(progress.note)
            raise KeyboardInterrupt

    with pytest.raises(BuildStopped):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=ManySlots(1, starting=True), on_progress=stop)
    assert notes[0].endswith("s: the cluster is full")


@pytest.mark.parametrize("passed", [{"memory_limit": 1 << 40}, {"workers": 0}])
def test_options_of_this_machine_are_rejected_with_workers_elsewhere(tmp_path, source, passed):
    with pytest.raises(ValueError, match="with workers elsewhere"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=ManySlots(1), **passed)
    assert not (tmp_path / "cache").exists()


def test_more_workers_than_this_process_are_rejected_by_the_inline_engine(tmp_path, source):
    with pytest.raises(ValueError, match=r"engine='inline', which has one \(got 3\)"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine="inline", workers=3)
