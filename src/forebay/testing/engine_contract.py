"""What every engine promises, as tests to inherit: a subclass makes one, and a few small chunks are run by it."""

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import pytest

from forebay.engine.base import Crew, Engine, Event, Made, Refused
from forebay.errors import SourceChanged
from forebay.raw import RawRecipe

PATIENCE = 120.0  # seconds until a chunk counts as forgotten
RAISED: dict[int, Exception] = {
    101: OSError(errno.EIO, "the disk says no"),
    102: OSError(errno.ENOSPC, "the disk is full"),
    103: SourceChanged("cache", {"a.txt": "changed"}),
    104: ValueError("a recipe may raise anything"),
}


class Parts(NamedTuple):
    """What a task is made by; workers must be able to import it."""

    recipe: RawRecipe = RawRecipe()
    source: None = None


@dataclass(frozen=True)
class Squares:
    """A task: the record of a chunk is the square of its number and the process that computed it."""

    chunks: Parts = field(default_factory=Parts)
    fails_in: str = "begin"

    def begin(self, chunk: int) -> Callable[[], tuple[int, int]]:
        if self.fails_in == "begin":
            _fail(chunk)
        return partial(self._finish, chunk, os.getpid())

    def _finish(self, chunk: int, pid: int) -> tuple[int, int]:
        _fail(chunk)
        return chunk * chunk, pid


def _fail(chunk: int) -> None:
    if chunk in RAISED:
        raise RAISED[chunk]


def run_chunks(crew: Crew, chunks: Sequence[int], given: int = 0) -> dict[int, Event]:
    """What became of each chunk, once all but the first `given` were given to whoever was free."""
    waiting, told, deadline = list(chunks[given:]), dict[int, Event](), time.monotonic() + PATIENCE
    while len(told) < len(chunks):
        assert time.monotonic() < deadline, f"nothing was heard of chunks {sorted(set(chunks) - told.keys())}"
        for slot in crew.idle():
            if waiting:
                crew.give(slot, waiting.pop(0))
        for event in crew.wait(0.2):
            assert event.chunk is not None, event
            assert event.chunk not in told, f"chunk {event.chunk} was reported twice"
            told[event.chunk] = event
    return told


class EngineContract:
    def make_engine(self) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        with closing(self.make_engine()) as engine:
            yield engine

    def test_every_chunk_is_made_once_and_its_record_comes_back(self, engine: Engine) -> None:
        with _started(engine, 2) as crew:
            told = run_chunks(crew, range(7))
            at_work = set(crew.pids())
        assert all(isinstance(event, Made) for event in told.values())
        records = {chunk: event.record for chunk, event in told.items() if isinstance(event, Made)}
        assert {chunk: record[0] for chunk, record in records.items()} == {chunk: chunk**2 for chunk in range(7)}
        assert {record[1] for record in records.values()} <= at_work

    @pytest.mark.parametrize("where", ["begin", "finish"])
    def test_what_a_chunk_raises_is_reported_by_its_kind_and_the_others_are_made(
        self, engine: Engine, where: str
    ) -> None:
        with _started(engine, 1, where) as crew:
            told = run_chunks(crew, [*RAISED, 5])
        refused = {chunk: event.trouble for chunk, event in told.items() if isinstance(event, Refused)}
        assert refused == {101: "io", 102: "disk-full", 103: "source-changed", 104: "error"}
        assert isinstance(told[5], Made)
        changed = told[103]
        assert isinstance(changed, Refused)
        assert dict(changed.files) == {"a.txt": "changed"}

    def test_a_slot_that_was_given_a_chunk_is_not_idle_before_it_is_waited_for(self, engine: Engine) -> None:
        with _started(engine, 1) as crew:
            (slot,) = crew.idle()
            crew.give(slot, 3)
            assert slot not in crew.idle()
            assert isinstance(run_chunks(crew, [3], given=1)[3], Made)

    def test_with_nothing_to_do_waiting_ends_without_events(self, engine: Engine) -> None:
        with _started(engine, 1) as crew:
            assert crew.wait(0.01) == []

    def test_it_makes_chunks_after_it_was_given_more_slots_and_fewer(self, engine: Engine) -> None:
        with _started(engine, 1) as crew:
            for workers in (2, 1):
                crew.resize(workers)
                assert all(isinstance(event, Made) for event in run_chunks(crew, range(4)).values())
            assert 1 <= len(crew.pids()) <= 2

    def test_stopping_ends_its_processes_and_what_was_under_way(self, engine: Engine) -> None:
        crew = engine.start(Squares(), 2)
        crew.give(crew.idle()[0], 1)
        others = [pid for pid in crew.pids() if pid != os.getpid()]
        crew.stop()
        assert not any(_is_running(pid) for pid in others)

    def test_what_was_preloaded_is_used_or_ended_when_it_is_closed(self) -> None:
        engine = self.make_engine()
        engine.preload(RawRecipe(), 2)
        with _started(engine, 1) as crew:
            assert isinstance(run_chunks(crew, [4])[4], Made)
        engine.close()
        engine.close()


@contextmanager
def _started(engine: Engine, workers: int, fails_in: str = "begin") -> Iterator[Crew]:
    crew = engine.start(Squares(fails_in=fails_in), workers)
    try:
        yield crew
    finally:
        crew.stop()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
