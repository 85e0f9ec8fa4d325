"""The queue of a builder: streams stay with a slot, claims come first, failed chunks are tried again."""

import pytest

from forebay.building import queue
from forebay.building.queue import TRIES, ChunkQueue
from forebay.cache.claims import Claims
from forebay.format import layout
from forebay.store import MemoryStore

FOLDER = layout.layer_folder("raw", "0123456789abcdef")
SLOTS = (0, 1)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def queue_of(store, chunks, streams=None, listed=()) -> ChunkQueue:
    return ChunkQueue(chunks, streams or {}, FOLDER, Claims(store), lambda chunk: chunk in listed)


def test_a_stream_stays_with_the_slot_that_began_it(store):
    streams = {0: "a.gz", 1: "a.gz", 2: "b.gz", 3: "b.gz"}
    chunks = queue_of(store, range(4), streams)
    order = [(slot, chunks.claim_next(slot, SLOTS)) for slot in (0, 1, 0, 1)]
    assert order == [(0, 0), (1, 2), (0, 1), (1, 3)]


def test_a_chunk_that_was_listed_after_the_first_look_is_not_made(store):
    chunks = queue_of(store, [0, 1], listed={0})
    assert chunks.claim_next(0, SLOTS) == 1
    assert chunks.listed_elsewhere == 1
    assert [entry.key for entry in store.entries(layout.CLAIMS)] == [layout.claim(FOLDER, 1)]


def test_a_chunk_is_given_up_after_some_tries_and_its_claim_is_free(store, monkeypatch):
    monkeypatch.setattr(queue, "FIRST_PAUSE", 0.0)
    chunks = queue_of(store, [7])
    for _ in range(TRIES):
        assert chunks.claim_next(0, (0,)) == 7
        chunks.retry(7, "the disk is tired")
    assert chunks.is_empty
    assert chunks.failed.keys() == {7}
    assert not list(store.entries(layout.CLAIMS))


def test_a_slot_on_which_every_chunk_fails_gets_no_more_while_another_works(store, monkeypatch):
    monkeypatch.setattr(queue, "FIRST_PAUSE", 0.0)
    chunks = queue_of(store, range(10))
    for _ in range(queue.SICK):
        chunk = chunks.claim_next(0, SLOTS)
        assert chunk is not None
        chunks.retry(chunk, "no library")
    assert chunks.claim_next(0, SLOTS) is None
    assert chunks.claim_next(1, SLOTS) is not None
    assert chunks.claim_next(0, (0,)) is not None, "alone, it is tried again"


def test_what_another_builder_holds_is_left_to_it_while_it_is_alive(store):
    other = Claims(store)
    assert other.take(layout.claim(FOLDER, 0))
    chunks = queue_of(store, [0])
    assert chunks.claim_next(0, SLOTS) is None
    assert not chunks.is_empty
    chunks.look_at_held()  # its owner is this process, which runs
    assert chunks.elsewhere == {0}
    assert chunks.is_empty
    other.release_all()
