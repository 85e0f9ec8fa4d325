"""Worker processes: their deaths are reported and made good, and they never outlive their builder."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.helpers.builders import (
    children_of,
    chunk_count,
    chunk_digests,
    ending,
    is_running,
    patient,
    script_environment,
    start_builder,
    wait_until,
)
from tests.helpers.obedient_recipes import (
    NOTES,
    HesitantStore,
    LengthLayer,
    ObedientRecipe,
    makes,
    orders,
    write_orders,
)

import forebay as fb
from forebay.engine.base import WORKER, ChunkWorker, Died, Done, Failed, TaskDocument
from forebay.engine.local import LocalEngine
from forebay.errors import BuildFailed
from forebay.testing.engine_contract import run_chunks, stopping, wait_for_slots


@pytest.fixture
def notes(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv(NOTES, str(folder))
    return folder


def source_of(tmp_path: Path, lines: list[str]) -> fb.Source:
    return fb.sources.lines(write_orders(tmp_path / "source.txt", lines))


def undisturbed_digests(tmp_path: Path, source: fb.Source) -> dict[str, str]:
    """What a build without any orders followed would be: the orders were followed already."""
    fb.build(tmp_path / "undisturbed", source, ObedientRecipe(), workers=0)
    return chunk_digests(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["SIGKILL", "SIGSEGV"])
def test_a_worker_that_dies_is_reported_with_its_chunk_and_replaced_and_the_chunk_is_made(tmp_path, notes, cause):
    source = source_of(tmp_path, orders(6, c3=f"die {cause} 2"))
    seen = []
    report = fb.build(
        tmp_path / "cache", source, ObedientRecipe(), workers=2, on_progress=lambda now: seen.append(now.note)
    )
    assert report.built == 6
    assert len(report.deaths) == 2
    for death in report.deaths:
        assert "chunk 3" in death
        assert cause in death
        assert death in seen
    tries = [pid for pid, chunk in makes(notes) if chunk == 3]
    assert len(set(tries)) == 3
    assert [pid for pid in tries[:2] if f"worker {pid}" in "".join(report.deaths)] == tries[:2]
    assert chunk_digests(tmp_path / "cache") == undisturbed_digests(tmp_path, source)
    assert fb.status(tmp_path / "cache").claims == ()


def test_a_worker_writes_a_chunk_while_it_makes_the_next(tmp_path, notes):
    source = source_of(tmp_path, orders(5))
    report = fb.build(HesitantStore(tmp_path / "cache", chunks=5), source, ObedientRecipe(), workers=1)
    assert report.built == 5
    assert chunk_digests(tmp_path / "cache") == undisturbed_digests(tmp_path, source)


@pytest.mark.slow
def test_a_chunk_is_not_blamed_for_the_next_one_that_kills_its_worker(tmp_path, notes):
    source = source_of(tmp_path, orders(4, c3="die SIGKILL 3"))
    root = tmp_path / "cache"
    with pytest.raises(BuildFailed, match=r"(?s)chunk 3: .*SIGKILL.*3 tries") as caught:
        fb.build(HesitantStore(root, chunks=4, deadly=3), source, ObedientRecipe(), workers=1)
    assert set(caught.value.facts["failed"]) == {3}
    assert [chunk for _, chunk in makes(notes)].count(
        2
    ) == 4  # lost with its worker three times, as often as is allowed
    assert fb.status(root).layers[0].missing == (3,)
    assert fb.build(root, source, ObedientRecipe(), workers=1).built == 1
    assert chunk_digests(root) == undisturbed_digests(tmp_path, source)


@pytest.mark.slow
@pytest.mark.parametrize(("cause", "says"), [("die SIGKILL 3", "SIGKILL"), ("raise OSError 3", "OSError")])
def test_a_chunk_that_fails_three_times_is_recorded_with_its_reason_and_all_others_are_published(
    tmp_path, notes, cause, says
):
    source = source_of(tmp_path, orders(6, c3=cause))
    with pytest.raises(BuildFailed, match=rf"chunk 3: .*{says}.*3 tries") as caught:
        fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=2)
    assert set(caught.value.facts["failed"]) == {3}
    assert [chunk for _, chunk in makes(notes)].count(3) == 3
    status = fb.status(tmp_path / "cache")
    assert status.claims == ()
    assert (status.layers[0].missing, status.layers[0].listed) == ((3,), 5)

    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=2)
    assert (report.built, report.present) == (1, 5)
    assert chunk_digests(tmp_path / "cache") == undisturbed_digests(tmp_path, source)
    assert fb.status(tmp_path / "cache").claims == ()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_input_output_error_is_tried_again(tmp_path, notes, workers):
    source = source_of(tmp_path, orders(4, c1="raise OSError 2"))
    report = fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=workers)
    assert report.built == 4
    assert [chunk for _, chunk in makes(notes)].count(1) == 3


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_recipe_fails_its_chunk_at_once_and_the_others_go_on(tmp_path, notes, workers):
    source = source_of(tmp_path, orders(6, c2="raise ValueError 1"))
    with pytest.raises(BuildFailed, match=r"chunk 2: ValueError: as line source.txt@1000 says"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=workers)
    assert sorted(chunk for _, chunk in makes(notes)) == [0, 1, 2, 3, 4, 5]
    assert fb.status(tmp_path / "cache").layers[0].missing == (2,)
    assert len(fb.open_cache(tmp_path / "cache")) == 10


def test_a_recipe_that_fails_on_everything_is_not_tried_on_everything(tmp_path, notes):
    bad = {f"c{chunk}": "raise ValueError 9" for chunk in range(60)}
    source = source_of(tmp_path, orders(60, **bad))
    with pytest.raises(BuildFailed, match="as line"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0)
    assert 3 <= len(makes(notes)) < 60


def test_workers_that_cannot_even_begin_end_the_build(tmp_path, notes, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    source = source_of(tmp_path, orders(2))
    with pytest.raises(BuildFailed, match="exit code 1"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=1, on_progress=patient())


@pytest.mark.slow
def test_a_recipe_that_workers_cannot_import_is_named(tmp_path, notes, monkeypatch):
    module = types.ModuleType("only_here")
    module.__dict__["OnlyHere"] = type("OnlyHere", (ObedientRecipe,), {"__module__": "only_here"})
    monkeypatch.setitem(sys.modules, "only_here", module)
    source = source_of(tmp_path, orders(2))
    with pytest.raises(BuildFailed, match="No module named 'only_here'"):
        fb.build(tmp_path / "cache", source, module.OnlyHere(), workers=1, on_progress=patient(60))
    fb.build(tmp_path / "cache", source, module.OnlyHere(), workers=0)
    assert fb.status(tmp_path / "cache").complete


def test_workers_end_with_a_builder_that_is_killed(tmp_path, notes):
    stuck = tmp_path / "stuck"
    write_orders(tmp_path / "source.txt", orders(40, c7=f"stop {stuck} 1"))
    builder = start_builder(
        tmp_path / "cache", tmp_path / "source.txt", notes, {"seconds": 0.05}, workers=2, lease_seconds=5
    )
    wait_until(stuck.exists)
    wait_until(lambda: chunk_count(tmp_path / "cache") > 8)
    workers = children_of(builder.pid)
    assert len(workers) == 2
    builder.kill()
    builder.communicate()
    wait_until(lambda: not any(map(is_running, workers)), 10, "workers outlived their builder")
    after = chunk_count(tmp_path / "cache")
    report = fb.build(
        tmp_path / "cache", fb.sources.lines(tmp_path / "source.txt"), ObedientRecipe(seconds=0.05), workers=2
    )
    assert (report.built, report.present) == (40 - after, after)


@pytest.mark.slow
def test_workers_are_gone_when_a_build_returns(tmp_path, notes):
    before = set(children_of(os.getpid()))
    seen: set[int] = set()
    fb.build(
        tmp_path / "cache",
        source_of(tmp_path, orders(6)),
        ObedientRecipe(),
        workers=2,
        on_progress=lambda progress: seen.update(progress.pids),
    )
    assert len(seen) == 2
    assert set(children_of(os.getpid())) == before


def run_script(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, script, tmp_path], env=script_environment(), capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_a_script_without_a_main_guard_builds_with_workers(tmp_path):
    (tmp_path / "source.txt").write_bytes(b"some words\n" * 500)
    ended = run_script(
        tmp_path,
        """
        import sys
        import forebay as fb
        print("once")
        source = fb.sources.lines(sys.argv[1] + "/source.txt")
        report = fb.build(sys.argv[1] + "/cache", source, fb.RawRecipe(chunk_bytes=2000), workers=2)
        print(report.built == report.chunks > 3)
        """,
    )
    assert (ended.stdout, ended.stderr) == ("once\nTrue\n", "")


def test_a_recipe_defined_in_the_script_itself_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "source.txt").write_bytes(b"some words\n" * 500)
    ended = run_script(
        tmp_path,
        """
        import sys
        import forebay as fb
        class Mine(fb.RawRecipe, frozen=True): pass
        source = fb.sources.lines(sys.argv[1] + "/source.txt")
        try:
            fb.build(sys.argv[1] + "/cache", source, Mine(), workers=2)
        except fb.errors.RecipeInvalid as error:
            print(error)
        print(fb.build(sys.argv[1] + "/cache", source, Mine(), workers=0).built)
        """,
    )
    assert ended.stderr == ""
    first, second = ended.stdout.splitlines()
    assert first.startswith("Mine is defined in the script itself")
    assert "move it to a module" in first
    assert "workers=0" in first
    assert second == "1"


def test_an_interrupt_from_the_terminal_stops_cleanly_and_a_rerun_goes_on(tmp_path, notes):
    write_orders(tmp_path / "source.txt", orders(40))
    builder = start_builder(tmp_path / "cache", tmp_path / "source.txt", notes, {"seconds": 0.05}, workers=2)
    wait_until(lambda: chunk_count(tmp_path / "cache") > 3)
    workers = children_of(builder.pid)
    builder.send_signal(signal.SIGINT)
    ended = ending(builder)
    assert ended["error"] == "BuildStopped"
    assert "run the same command to resume" in ended["text"]
    assert not any(map(is_running, workers))
    present = chunk_count(tmp_path / "cache")
    assert 3 < present < 40
    status = fb.status(tmp_path / "cache")
    assert status.claims == ()
    # A chunk that was written but not yet reported when the signal came is on disk; the next build adopts it.
    assert 3 <= status.layers[0].listed <= present
    assert not list((tmp_path / "cache").rglob(".tmp-*"))
    report = fb.build(
        tmp_path / "cache", fb.sources.lines(tmp_path / "source.txt"), ObedientRecipe(seconds=0.05), workers=2
    )
    assert report.built + report.present == 40
    assert sum(1 for _ in makes(notes)) <= 40 + 2


@pytest.mark.slow
def test_a_layer_is_made_by_workers_as_it_is_in_process(tmp_path, notes):
    source = source_of(tmp_path, orders(6))
    for name, workers in (("one", 0), ("two", 2)):
        fb.build(tmp_path / name, source, ObedientRecipe(), workers=0)
        report = fb.build(tmp_path / name, None, LengthLayer(), workers=workers)
        assert (report.built, report.rows, report.failures) == (6, 12, 6)
    assert chunk_digests(tmp_path / "one") == chunk_digests(tmp_path / "two")
    rows = fb.open_cache(tmp_path / "two").read(range(12), columns=["lengths.present"])
    assert rows["lengths.present"].tolist() == [True, False] * 6


@dataclass(frozen=True)
class Numbered:
    """A task whose record is the number of the worker; chunk 9 kills it."""

    worker: int = 0

    def document(self) -> TaskDocument:
        return TaskDocument(opener="tests.engine.test_workers:open_numbered", body={WORKER: self.worker})

    def begin(self, chunk: int) -> Callable[[], int]:
        if chunk == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return lambda: self.worker


def open_numbered(body: Mapping[str, int]) -> Numbered:
    return Numbered(body[WORKER])


@pytest.mark.slow
def test_workers_are_numbered_and_the_number_of_a_dead_one_is_used_again():
    engine = LocalEngine()
    with stopping(engine):
        engine.start(Numbered(), 2)
        numbers = []
        for round_ in range(2):
            for place, slot in enumerate(wait_for_slots(engine, 2)):
                engine.submit(slot, 2 * round_ + place)
            heard = run_chunks(engine, [2 * round_, 2 * round_ + 1], submitted=2)
            numbers.append(sorted(event.record for event in heard.values()))
            engine.submit(wait_for_slots(engine, 2)[0], 9)
            assert isinstance(run_chunks(engine, [9], submitted=1)[9], Died)
    assert numbers == [[0, 1], [0, 1]]


LIMITS = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Threads:
    """A task whose record is how many threads a worker tells libraries to start."""

    def document(self) -> TaskDocument:
        return TaskDocument(opener="tests.engine.test_workers:open_threads", body={})

    def begin(self, chunk: int) -> Callable[[], list[str | None]]:
        return lambda: [os.environ.get(name) for name in LIMITS]


def open_threads(body: Mapping[str, int]) -> Threads:
    return Threads()


@pytest.mark.parametrize(("own", "found"), [(None, ["1", "1", "1"]), ("3", ["1", "3", "1"])])
def test_a_worker_has_one_thread_unless_the_user_says_otherwise(monkeypatch, own, found):
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv("FASTOKENS_BPE_THREADS", own)
    with stopping(LocalEngine()) as engine:
        engine.start(Threads(), 1)
        engine.submit(wait_for_slots(engine, 1)[0], 0)
        assert run_chunks(engine, [0], submitted=1)[0].record == found


class Loop:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


class Probing:
    """A task whose record is whether garbage is collected as it is made, and whether its own is gone by its writing.

    The record of chunk 9 is one that cannot be sent.
    """

    def begin(self, chunk: int) -> Callable[[], list[bool] | int]:
        loop, is_collecting = weakref.ref(Loop()), gc.isenabled()
        return lambda: 2**70 if chunk == 9 else [is_collecting, loop() is None]


def open_probing(body: Mapping[str, int]) -> Probing:
    return Probing()


@pytest.fixture
def worker():
    yield ChunkWorker(TaskDocument(opener="tests.engine.test_workers:open_probing", body={}).encode())
    gc.enable()  # which a worker, a process of its own, leaves off
    gc.unfreeze()


def test_garbage_is_collected_between_chunks_only(worker):
    for chunk in range(2):
        worker.compute(chunk)
        assert msgspec.msgpack.decode(worker.write(), type=Done | Failed).record == [False, True]


def test_a_chunk_is_not_computed_to_the_end_before_the_last_one_is_written(worker):
    worker.compute(0)
    computing = threading.Thread(target=worker.compute, args=(1,), daemon=True)
    computing.start()
    computing.join(0.3)
    assert computing.is_alive()
    worker.write()
    computing.join(60)
    assert not computing.is_alive()


def test_a_worker_whose_record_cannot_be_sent_does_not_hang(worker):
    worker.compute(9)
    with pytest.raises(OverflowError):
        worker.write()
    computing = threading.Thread(target=worker.compute, args=(1,), daemon=True)
    computing.start()
    computing.join(60)
    assert not computing.is_alive()
