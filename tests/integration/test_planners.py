"""Builders that start together: one plans, the others wait for its plan; who is killed is replaced."""

import io
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tests.builders import ending, every_file, wait_until
from tests.cli.running import run
from tests.planners import (
    FILES,
    OTHER,
    RECIPE,
    NotedLines,
    claim_elsewhere,
    noted,
    start_planner,
    write_source,
)

import forebay as fb
from forebay.cache.claims import PlanningClaim, read_claims
from forebay.cache.plan import KeptResults, load_plan
from forebay.cache.records import Progress
from forebay.errors import CacheNotFound, SourceUnreadable, TokenizerUnusable
from forebay.format import layout
from forebay.preview.console import Lines
from forebay.store import LocalStore, MemoryStore
from forebay.store.base import this_process

NAMES = [f"{number:02d}.txt.gz" for number in range(FILES)]


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv("PLANNERS_NOTES", str(folder))
    return folder


def same_as_alone(tmp_path: Path, root: Path) -> None:
    fb.build(tmp_path / "alone", NotedLines(str(tmp_path / "source"), (".",)), RECIPE, workers=0)
    for name in ("plan", "layers"):
        files = every_file(root / name)
        assert files == every_file(tmp_path / "alone" / name)
        assert [(root / name / file).read_bytes() for file in files] == [
            (tmp_path / "alone" / name / file).read_bytes() for file in files
        ]


def test_of_builders_that_start_together_one_scans_and_the_others_wait_for_its_plan(tmp_path, notes):
    write_source(tmp_path / "source")
    (notes / "hold").touch()
    builders = [start_planner(notes, tmp_path / "cache", tmp_path / "source") for _ in range(3)]
    wait_until(lambda: len(noted(notes, "waiting")) == 2)
    (planner,) = fb.status(tmp_path / "cache").planners
    assert (planner.state, planner.total_files) == ("working", FILES)
    (notes / "hold").unlink()
    answers = [ending(one) for one in builders]
    assert all("report" in answer for answer in answers), answers
    assert noted(notes, "scans") == NAMES, "every file is scanned once, whoever does it"
    assert not (tmp_path / "cache/planning").exists()
    same_as_alone(tmp_path, tmp_path / "cache")


def test_a_planner_that_is_killed_is_replaced_by_one_that_continues(tmp_path, notes):
    write_source(tmp_path / "source")
    root = tmp_path / "cache"
    (notes / "hold").touch()
    builders = [start_planner(notes, root, tmp_path / "source", 3600) for _ in range(3)]
    wait_until(lambda: len(noted(notes, "waiting")) == 2)
    wait_until(lambda: len(list(root.glob("planning/*.bin"))) == FILES - 1)
    (claim,) = read_claims(LocalStore(root), None).values()
    (planner,) = [one for one in builders if one.pid == claim.pid]
    planner.kill()
    planner.communicate()
    wait_until(lambda: {one.pid for one in read_claims(LocalStore(root), None).values()} - {claim.pid})
    (notes / "hold").unlink()
    builders.remove(planner)
    assert all("report" in ending(one) for one in builders)
    assert noted(notes, "scans") == NAMES, "what was found before is not scanned again"
    assert not (root / "planning").exists()
    same_as_alone(tmp_path, root)


def test_who_waits_for_a_plan_stops_at_once(tmp_path, notes):
    write_source(tmp_path / "source")
    claim_elsewhere(LocalStore(tmp_path / "cache"))
    waiter = start_planner(notes, tmp_path / "cache", tmp_path / "source", 3600)
    wait_until(lambda: noted(notes, "waiting"))
    waiter.terminate()
    assert ending(waiter)["error"] == "KeyboardInterrupt"
    assert noted(notes, "scans") == []
    assert every_file(tmp_path / "cache") == ["planning/000000.1.json"], "the claim of another is left alone"


def test_builders_of_a_source_that_cannot_be_planned_each_say_so_and_leave_nothing(tmp_path, notes):
    write_source(tmp_path / "source")
    (tmp_path / "source/03.txt.gz").write_bytes(b"not gzip at all")
    builders = [start_planner(notes, tmp_path / "cache", tmp_path / "source") for _ in range(3)]
    answers = [ending(one) for one in builders]
    assert [answer.get("error") for answer in answers] == ["SourceUnreadable"] * 3, answers
    assert every_file(tmp_path) == sorted([*(f"source/{name}" for name in NAMES), *every_notes(tmp_path)])


def every_notes(tmp_path: Path) -> list[str]:
    return [f"notes/{name}" for name in every_file(tmp_path / "notes")]


def test_a_planner_elsewhere_that_is_silent_for_a_lease_is_replaced(tmp_path, notes):
    store, source = MemoryStore(), write_source(tmp_path / "source")
    claim_elsewhere(store)
    waited: list[Progress] = []
    fb.build(store, source, RECIPE, workers=0, lease_seconds=0.2, on_progress=waited.append)
    assert waited[0].waiting_for == ("node9",)
    assert fb.status(store).complete
    assert list(store.entries(layout.PLANNING)) == [], "nor is the claim of the dead one left"


def while_waiting(action: Callable[[], object]) -> Callable[[Progress], None]:
    """A listener that does something when a builder has found that another plans."""
    moments: list[Progress] = []

    def listen(progress: Progress) -> None:
        if progress.phase == "waiting" and not moments:
            moments.append(progress)
            action()

    return listen


def test_who_waited_takes_the_plan_of_the_other(tmp_path, notes):
    store, source = MemoryStore(), write_source(tmp_path / "source")
    key = claim_elsewhere(store)

    def plan() -> None:
        store.delete(key)
        fb.build(store, source, RECIPE, workers=0, end_chunk=0)

    report = fb.build(store, source, RECIPE, workers=0, lease_seconds=3600, on_progress=while_waiting(plan))
    assert noted(notes, "scans") == NAMES
    assert (report.present, len(load_plan(store).segments)) == (1, 1)


def test_who_waits_for_a_planner_that_gives_up_plans_and_reports_its_own_error(tmp_path, notes):
    store, source = MemoryStore(), write_source(tmp_path / "source")
    (tmp_path / "source/03.txt.gz").write_bytes(b"not gzip at all")
    key = claim_elsewhere(store)
    with pytest.raises(SourceUnreadable, match=r"03\.txt\.gz"):
        fb.build(store, source, RECIPE, workers=0, on_progress=while_waiting(lambda: store.delete(key)))
    assert list(store.entries("")) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_planner_that_fails_removes_the_root_only_if_it_made_it(tmp_path, notes, is_there):
    source, root = write_source(tmp_path / "source"), tmp_path / "cache"
    (tmp_path / "source/03.txt.gz").write_bytes(b"not gzip at all")
    if is_there:
        root.mkdir()
        key = claim_elsewhere(LocalStore(root))
    with pytest.raises(SourceUnreadable):
        fb.build(root, source, RECIPE, workers=0, on_progress=while_waiting(lambda: LocalStore(root).delete(key)))
    assert root.exists() == is_there, "an empty folder that somebody made stays"


def test_who_waited_counts_the_time_of_planning_from_its_turn():
    store = MemoryStore()
    key = claim_elsewhere(store)
    planner = PlanningClaim(store, 0, "here", 3600.0, files=1, size=1)
    for _ in planner.waits():
        store.delete(key)
    (claim,) = read_claims(store, None).values()
    planner.release_all()
    assert (claim.host, claim.seconds) == ("here", 0.0), "it has waited for a tenth of a second at least"


def test_a_tokenizer_that_is_missing_is_named_before_a_plan_is_waited_for(tmp_path):
    store, waits = MemoryStore(), list[Progress]()
    claim_elsewhere(store)
    (tmp_path / "lines.jsonl").write_text('{"text": "a line"}\n')
    source, recipe = fb.sources.jsonl(tmp_path / "lines.jsonl"), fb.TokenRecipe(tokenizer=str(tmp_path / "none.json"))
    with pytest.raises(TokenizerUnusable):
        fb.build(store, source, recipe, workers=0, lease_seconds=0.2, on_progress=waits.append)
    assert waits == []


def test_of_two_that_grow_together_the_second_waits_for_the_segment_of_the_first(tmp_path, notes):
    store, source = MemoryStore(), write_source(tmp_path / "source", 0, 3)
    fb.build(store, source, RECIPE, workers=0)
    write_source(tmp_path / "source", 3)
    key = claim_elsewhere(store, segment=1)

    def grow() -> None:
        store.delete(key)
        fb.grow(store, source, workers=0)

    fb.grow(store, source, workers=0, lease_seconds=3600, on_progress=while_waiting(grow))
    assert noted(notes, "scans") == NAMES
    assert len(load_plan(store).segments) == 2


def test_with_a_key_a_builder_plans_for_itself(tmp_path, notes, monkeypatch):
    monkeypatch.setenv("FOREBAY_HMAC_KEY", "k" * 40)
    store = MemoryStore()
    key = claim_elsewhere(store)
    fb.build(store, write_source(tmp_path / "source"), RECIPE, workers=0, lease_seconds=3600)
    assert fb.status(store).complete
    store.delete(key)


class AskedStore(MemoryStore):
    """Notes the requests about planning."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def create(self, key, data, *, durable=True):
        self.asked += ["create"] * key.startswith(layout.PLANNING)
        return super().create(key, data, durable=durable)

    def delete(self, key, *, if_etag=None):
        self.asked += ["delete"] * key.startswith(layout.PLANNING)
        return super().delete(key, if_etag=if_etag)

    def entries(self, prefix):
        self.asked += ["list"] * prefix.startswith(layout.PLANNING)
        return super().entries(prefix)


class TakenStore(MemoryStore):
    """Somebody else always has the claim, and is gone when it is looked for."""

    def create(self, key, data, *, durable=True):
        return not layout.parse_claim(key) and super().create(key, data, durable=durable)


def test_after_two_planners_that_ended_without_a_plan_a_builder_plans_without_a_claim(tmp_path):
    claim = PlanningClaim(TakenStore(), 0, "here", 60.0, files=1, size=1)
    assert list(claim.waits()) == []
    claim.release_all()


def test_a_builder_that_is_alone_claims_planning_by_one_request_and_releases_it_by_one(tmp_path):
    store = AskedStore()
    (tmp_path / "lines.txt").write_text("a line\n" * 100)
    fb.build(store, fb.sources.lines(tmp_path / "lines.txt"), RECIPE, workers=0)
    assert store.asked == ["create", "delete"]


def test_planning_counts_the_bytes_of_the_source(tmp_path):
    source, seen = write_source(tmp_path / "source"), list[Progress]()
    fb.build(tmp_path / "cache", source, RECIPE, workers=0, on_progress=seen.append)
    planned = [one for one in seen if one.phase == "planning"]
    total = sum(path.stat().st_size for path in (tmp_path / "source").iterdir())
    assert {one.total_bytes for one in planned} == {total}
    assert [one.read_bytes for one in planned] == sorted(one.read_bytes for one in planned)
    assert (planned[-1].read_bytes, planned[-1].done) == (total, FILES)
    assert len({one.read_bytes for one in planned}) > FILES // 2


def lines_of(*moments: Progress) -> list[str]:
    text, clock = io.StringIO(), iter([0.0, *(10.0 * (at + 1) for at in range(len(moments)))])
    shown = Lines(Console(file=text, width=1000), clock=lambda: next(clock))
    for moment in moments:
        shown(moment)
    return text.getvalue().splitlines()


def test_a_line_of_planning_has_the_share_of_bytes_and_the_time_left():
    begun, on = (
        Progress(phase="planning", done=done, total=9, unit="files", read_bytes=size, total_bytes=28_000_000)
        for done, size in ((0, 0), (1, 7_000_000))
    )
    _, line = lines_of(begun, on)
    assert re.fullmatch(r"planning 1/9 files  25 %, 7\.0 MB of 28\.0 MB planned, .*, ETA .+", line)


def test_a_line_says_for_whose_plan_a_builder_waits():
    waits = Progress(phase="waiting", done=3, total=12, unit="files", waiting_for=("node9",))
    (line,) = lines_of(waits)
    assert line.startswith("waiting for the plan that node9 makes 3/12 files  25 %")


def test_status_shows_who_plans_before_there_is_a_cache(tmp_path):
    with pytest.raises(CacheNotFound):
        fb.status(tmp_path / "cache")
    claim_elsewhere(
        LocalStore(tmp_path / "cache"), files=3, total_files=12, bytes=200, total_bytes=800, seconds=30.0, beat=3
    )
    status = fb.status(tmp_path / "cache")
    (planner,) = status.planners
    assert (planner.host, planner.files, planner.total_files, planner.state) == ("node9", 3, 12, "working")
    assert (planner.bytes, planner.total_bytes, planner.seconds, planner.eta_seconds) == (200, 800, 30.0, 90.0)
    assert (status.complete, status.generation) == (False, None)
    shown = run("status", str(tmp_path / "cache"))
    assert shown.code == 0
    assert "node9, process 7 · working for 30 s" in shown.out
    assert "3 of 12 files · 200 B of 800 B · ETA 1 min 30 s" in shown.out


def test_status_shows_who_plans_the_next_segment_and_not_who_planned_one_that_is_there(tmp_path):
    store = MemoryStore()
    fb.build(store, write_source(tmp_path / "source"), RECIPE, workers=0)
    claim_elsewhere(store, segment=0)
    assert (fb.status(store).planners, fb.status(store).foreign) == ((), ())
    claim_elsewhere(store, segment=1)
    assert [one.host for one in fb.status(store, depth="index").planners] == ["node9"]


@pytest.mark.parametrize("is_begun", [True, False])
def test_clean_removes_what_a_dead_planner_left(tmp_path, is_begun):
    root = tmp_path / "cache"
    if is_begun:
        fb.build(root, write_source(tmp_path / "source"), RECIPE, workers=0)
    store = LocalStore(root)
    KeptResults(store).keep(b"answer", "question")
    key = claim_elsewhere(store)
    report = fb.clean(root, lease_seconds=0.05)
    assert report.claims == (key,)
    assert [layout.is_planning(one) for one in report.temporary] == [True]
    assert not (root / "planning").exists()


@pytest.mark.parametrize("is_begun", [True, False])
def test_clean_removes_nothing_of_a_planner_at_work(tmp_path, is_begun):
    root = tmp_path / "cache"
    if is_begun:
        fb.build(root, write_source(tmp_path / "source"), RECIPE, workers=0)
    store, has_ended = LocalStore(root), threading.Event()
    KeptResults(store).keep(b"answer", "question")
    claim_elsewhere(store, owner=str(this_process()))
    before = every_file(root)
    assert fb.clean(root, lease_seconds=0.01).temporary == ()
    assert every_file(root) == before

    def beat() -> None:
        number = 0
        while not has_ended.wait(0.01):
            claim_elsewhere(store, owner=OTHER, beat=(number := number + 1))

    heart = threading.Thread(target=beat)
    heart.start()
    try:
        assert fb.clean(root, lease_seconds=1.0).temporary == ()
    finally:
        has_ended.set()
        heart.join()
    assert every_file(root) == before


def test_there_is_nothing_to_clean_where_nothing_was_planned(tmp_path):
    with pytest.raises(CacheNotFound):
        fb.clean(tmp_path / "cache")
