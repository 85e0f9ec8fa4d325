"""Engines with workers on several machines: a chunk that fails on one is made on another, and nothing is lost."""

import os
from collections import Counter

import pytest
from tests.builders import chunk_digests
from tests.recipes import NOTES, ObedientRecipe, orders, write_orders

import forebay as fb
from forebay.building import builder
from forebay.engine.base import Died, EngineUsage, Failed, MachineFailures, SlotResources, attempt_chunk
from forebay.errors import BuildFailed, BuildStopped, CacheNotShared, EngineUnusable, NotImportable, SourceNotShared

GONE = "FileNotFoundError: [Errno 2] No such file or directory: 'source.txt'"


class ManyMachines:
    """An engine whose slots are on several machines, all of them in this process: `acts` says what some do instead."""

    def __init__(self, places, acts=None, late=(), document=lambda body: None):
        self.places, self.acts, self.late, self.change = places, acts or {}, dict(late), document
        self.tried, self._task, self._given = Counter(), None, {}

    def capacity(self):
        return len(self.places)

    def preload(self, document, slots):
        pass

    def start(self, task, slots):
        self._task = task
        if not slots:
            document = task.document()
            self.change(document.body)
            document.open()

    def idle(self):
        return [slot for slot in range(len(self.places)) if slot not in self._given and slot not in self.late]

    def place(self, slot):
        return self.places[slot]

    def submit(self, slot, chunk):
        self._given[slot] = chunk

    def poll(self, timeout):
        """Every slot that fails, and one of those that work: to fail is quicker."""
        self.late = {slot: polls - 1 for slot, polls in self.late.items() if polls > 1}
        failing = [slot for slot in self._given if self.places[slot] in self.acts]
        working = [slot for slot in self._given if slot not in failing][:1]
        return [event for slot in [*failing, *working] if (event := self._made(slot)) is not None]

    def _made(self, slot):
        chunk, place = self._given.pop(slot), self.places[slot]
        self.tried[place] += 1
        act = self.acts.get(place)
        return (act(chunk) if act else None) or attempt_chunk(self._task, chunk)

    def resize(self, slots):
        pass

    def usage(self):
        return EngineUsage(workers=len(self.places), elsewhere=True, waiting="the cluster is full" if self.late else "")

    def stop(self):
        self._given.clear()

    close = stop


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv(NOTES, str(tmp_path))
    return fb.sources.lines(write_orders(tmp_path / "source.txt", orders(24)))


def missing(chunk):
    return Failed(chunk, "io", GONE)


def broken(chunk):
    return Failed(chunk, "error", "ImportError: libjpeg.so: cannot open shared object file")


@pytest.mark.parametrize("act", [missing, broken])
@pytest.mark.parametrize("places", ["abc", "abcc", "cba", "cc" * 3 + "ab"])
def test_a_machine_on_which_every_chunk_fails_is_named_and_left_out_and_all_chunks_are_made(
    tmp_path, source, places, act
):
    engine, notes = ManyMachines(list(places), {"c": act}), []
    report = fb.build(
        tmp_path / "cache", source, ObedientRecipe(), engine=engine, on_progress=lambda now: notes.append(now.note)
    )
    assert (report.made, report.failed) == (24, {})
    assert engine.tried["c"] <= 3 + places.count("c"), "no more than it had when the third failed"
    (said,) = [note for note in report.notes if note.startswith("c is left out: ")]
    assert act(0).reason in said
    assert said in notes
    fb.build(tmp_path / "alone", source, ObedientRecipe(), workers=0)
    assert chunk_digests(tmp_path / "cache") == chunk_digests(tmp_path / "alone")


def test_of_four_machines_three_can_fail(tmp_path, source):
    engine = ManyMachines(list("abcd"), dict.fromkeys("abc", missing))
    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=engine)
    assert (report.made, report.failed) == (24, {})
    assert len([note for note in report.notes if "is left out" in note]) >= 1


def test_a_machine_that_breaks_while_it_works_is_left_out_too(tmp_path, source):
    made = []

    def breaks(chunk):
        made.append(chunk)
        return missing(chunk) if len(made) > 4 else None

    engine = ManyMachines(list("ab"), {"b": breaks})
    assert fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=engine).made == 24
    assert len(made) == 4 + 3


def test_a_machine_that_fails_now_and_then_is_not_left_out(tmp_path, source):
    tried = Counter()

    def hiccup(chunk):
        tried["b"] += 1
        return missing(chunk) if tried["b"] % 2 else None

    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=ManyMachines(list("ab"), {"b": hiccup}))
    assert (report.made, [note for note in report.notes if "left out" in note]) == (24, [])
    assert tried["b"] > 6, "it had failed three times by then"


def test_where_the_machine_that_fails_is_the_first_to_begin_the_others_are_waited_for(tmp_path, source):
    engine = ManyMachines(list("ab"), {"a": missing}, late={1: 30})
    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=engine)
    assert (report.made, report.failed, engine.tried["a"]) == (24, {}, 3)


def test_others_are_not_waited_for_without_end(tmp_path, source, monkeypatch):
    monkeypatch.setattr(builder, "START_SECONDS", 0.0)
    engine = ManyMachines(list("ab"), {"a": lambda chunk: broken(chunk) if chunk == 3 else None}, late={1: 10**9})
    with pytest.raises(BuildFailed, match=r"1 chunk\(s\).*chunk 3: ImportError.* \(on a\); all others are kept"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=engine)


def test_a_chunk_that_fails_everywhere_is_recorded_with_its_reason_and_no_machine_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv(NOTES, str(tmp_path))
    wrong = {f"c{chunk}": "raise ValueError 99" for chunk in range(8)}
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(24, **wrong)))
    with pytest.raises(BuildFailed, match=r"8 chunk\(s\)") as caught:
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=ManyMachines(list("ab")))
    assert sorted(caught.value.failed) == list(range(8))
    assert all(reason.endswith(("(2 tries on a, b)", "(2 tries on b, a)")) for reason in caught.value.failed.values())
    assert len(chunk_digests(tmp_path / "cache")) == 16


def test_where_all_machines_fail_the_build_ends_and_says_where(tmp_path, source):
    with pytest.raises(BuildFailed, match=r"20 chunk\(s\).*No such file.* tries on "):
        fb.build(
            tmp_path / "cache", source, ObedientRecipe(), engine=ManyMachines(list("ab"), dict.fromkeys("ab", missing))
        )


def test_to_be_lost_with_a_machine_is_not_an_attempt(tmp_path, source):
    lost = Counter()

    def dies(chunk):
        lost[chunk] += 1
        return Died(None, "actor 1", "was lost", (chunk,)) if lost[chunk] <= 5 else None

    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=ManyMachines(["a"], {"a": dies}))
    assert (report.made, report.failed, len(report.deaths)) == (24, {}, 5 * 24)


def test_a_chunk_that_kills_workers_on_every_machine_is_given_up_after_three(tmp_path, source):
    def dies(chunk):
        return Died(chunk, "actor", "died") if chunk == 5 else None

    engine = ManyMachines(list("abcde"), dict.fromkeys("abcde", dies))
    with pytest.raises(BuildFailed, match=r"chunk 5: a worker was lost: died \(\d tries on ") as caught:
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=engine)
    assert list(caught.value.failed) == [5]


def test_while_no_worker_is_there_a_notice_says_what_they_wait_for(tmp_path, source, monkeypatch):
    monkeypatch.setattr(builder, "STALL_SECONDS", 0.0)

    def stop(progress):
        if "no worker has been ready" in progress.note:
            notes.append(progress.note)
            raise KeyboardInterrupt

    notes = []
    with pytest.raises(BuildStopped):
        fb.build(
            tmp_path / "cache", source, ObedientRecipe(), engine=ManyMachines(["a"], late={0: 10**9}), on_progress=stop
        )
    assert notes[0].endswith("s: the cluster is full")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"sign": "/mnt/only-here/probe"}, CacheNotShared),
        ({"file": "not-there.txt"}, SourceNotShared),
        ({"recipe": {"class": "only_here:Recipe", "fields": {}, "inner": {}}}, NotImportable),
    ],
)
def test_a_machine_that_cannot_work_is_refused_before_the_build_is_planned(tmp_path, source, change, error):
    engine = ManyMachines(["a"], document=lambda body: body.update(change))
    with pytest.raises(error):
        fb.build(tmp_path / "new" / "cache", source, ObedientRecipe(), engine=engine)
    assert not (tmp_path / "new").exists()
    assert not [name for name in os.listdir(tmp_path) if "probe" in name]


def test_a_machine_that_sees_another_cache_of_that_name_is_refused(tmp_path, source):
    fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0, end_chunk=1)
    fb.build(tmp_path / "other", source, ObedientRecipe(), workers=0, end_chunk=1)
    engine = ManyMachines(["a"], document=lambda body: body["store"].update(arguments=[str(tmp_path / "other")]))
    with pytest.raises(CacheNotShared):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=engine)
    assert fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=ManyMachines(["a"])).made == 22


def test_what_a_worker_cannot_import_is_named_with_what_to_do(tmp_path, source):
    engine = ManyMachines(["a"], document=lambda body: body["recipe"].update({"class": "only_here:Recipe"}))
    with pytest.raises(NotImportable, match="make module 'only_here' importable by workers"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=engine)


@pytest.mark.parametrize("passed", [{"memory_limit": 1 << 40}, {"workers": 0}])
def test_what_only_this_machine_has_is_refused_with_workers_elsewhere(tmp_path, source, passed):
    with pytest.raises(ValueError, match="with workers elsewhere"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine=ManyMachines(["a"]), **passed)
    assert not (tmp_path / "cache").exists()


def test_more_workers_than_this_process_are_refused_by_the_inline_engine(tmp_path, source):
    with pytest.raises(ValueError, match=r"engine='inline', which has one \(got 3\)"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), engine="inline", workers=3)


def test_slots_are_counted_on_each_machine():
    each = SlotResources({"CPU": 2, "GPU": 0})
    assert each.slots("ray", "here", [{"CPU": 1.0}, {"CPU": 5.0}, {"CPU": 2.0}]) == 3
    with pytest.raises(
        EngineUnusable, match=r"no node of the cluster at 'here' has 2 CPU; the most of one: 1 CPU, 0 GPU"
    ):
        each.slots("ray", "here", [{"CPU": 1.0}, {"CPU": 1.0}])
    assert SlotResources({"CPU": 0, "GPU": 1}).slots("ray", "here", [{"CPU": 0.0, "GPU": 2.0}]) == 2


def test_a_chunk_waits_for_a_machine_on_which_it_has_not_failed():
    machines = MachineFailures()
    machines.see({"a", "b"}, more_may_come=False)
    machines.fail(7, "a", "why")
    assert (machines.suits(7, "a"), machines.suits(7, "b")) == (False, True)
    machines.see({"a"}, more_may_come=False)
    assert machines.suits(7, "a")
