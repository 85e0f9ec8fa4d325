"""The plan as a log, and the table over it: random segments, listed chunks, files and withdrawals."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.cache_files import segment_of

from forebay.cache.plan import Plan, load_plan
from forebay.cache.state import LayerState, numbers
from forebay.format import layout
from forebay.source import Part, SourceFile
from forebay.store import MemoryStore

FOLDER = layout.layer_folder("raw", "0123456789abcdef")
chunk_lists = st.lists(st.lists(st.integers(1, 9), max_size=3), max_size=4)  # weights of the parts of each chunk
logs = st.lists(chunk_lists, min_size=1, max_size=5)


def plan_of(log: list[list[list[int]]], mtime: int = 0) -> Plan:
    """Segments that cut one new file each, part after part."""
    plan = Plan(())
    for number, chunks in enumerate(log):
        file = SourceFile(f"{number}.txt", 1 + sum(map(sum, chunks)), mtime)
        parts, start = [], 0
        for chunk in chunks:
            ends = np.cumsum([start, *chunk]).tolist()
            parts.append([Part(file, low, high) for low, high in pairwise(ends)])
            start = ends[-1]
        plan = plan.appended(
            segment_of(
                parts,
                number=number,
                first_chunk=len(plan),
                source={"kind": "lines"},
                weight=5,
                previous=plan.last_digest,
                empty=[file],
            )
        )
    return plan


@given(logs)
def test_a_plan_that_is_read_back_is_the_one_that_was_appended(log):
    plan, store = plan_of(log), MemoryStore()
    for segment in plan.segments:
        store.create(layout.plan_segment(segment.number), segment.encode())
    read = load_plan(store)
    assert read.digests == plan.digests
    assert len(read) == sum(map(len, log))
    assert [read.parts(chunk) for chunk in range(len(read))] == [plan.parts(chunk) for chunk in range(len(plan))]


@given(logs, st.data())
def test_appending_changes_nothing_that_is_planned(log, data):
    plan = plan_of(log)
    before = plan.first(data.draw(st.integers(0, len(log))))
    assert plan.digests[: len(before.segments)] == before.digests
    assert all(plan.parts(chunk) == before.parts(chunk) for chunk in range(len(before)))


@given(logs)
def test_digests_cover_ranges_and_predecessors_and_no_times(log):
    assert plan_of(log).digests == plan_of(log, mtime=7).digests
    assert plan_of([*log[:-1], [*log[-1], [1]]]).last_digest != plan_of(log).last_digest
    one, other = (plan_of([[[weight]], *log]) for weight in (1, 2))  # the same from the second segment on
    assert not set(one.digests) & set(other.digests)


@given(logs, st.data())
def test_withdrawn_segments_are_not_planned_and_keep_their_numbers(log, data):
    withdrawn = data.draw(st.sets(st.integers(0, len(log) - 1)))
    plan = Plan(plan_of(log).segments, withdrawn)
    expected = [number not in withdrawn for number, chunks in enumerate(log) for _ in chunks]
    assert plan.planned.tolist() == expected
    assert set(plan.files) == {f"{number}.txt" for number in range(len(log)) if number not in withdrawn}
    assert plan.weights.tolist() == [sum(chunk) for chunks in log for chunk in chunks]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans())))
def test_every_chunk_is_listed_or_to_do_or_not_planned(rows):
    planned, listed, file = (np.array([row[at] for row in rows], np.bool_) for at in range(3))
    state = LayerState(planned, listed, file)
    assert (state.todo | listed | ~planned).all()
    assert not (state.todo & listed).any()
    assert numbers(state.unlisted) == [chunk for chunk in numbers(state.todo) if file[chunk]]
    assert not (state.lost & file).any()
