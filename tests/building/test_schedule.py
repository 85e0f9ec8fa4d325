"""Who gets which chunk next: in order, and a stream's chunks to one worker."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.building.builder import ChunkSchedule


def always_mine(chunk: int) -> str:
    return "mine"


def test_chunks_of_no_stream_are_handed_out_in_the_order_given_to_whoever_asks():
    schedule = ChunkSchedule([4, 2, 7], {}, always_mine)
    assert [schedule.next_for(slot) for slot in (0, 1, 0, 1)] == [4, 2, 7, None]


def test_every_stream_stays_with_the_slot_that_began_it():
    schedule = ChunkSchedule(range(6), {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "b"}, always_mine)
    assert [schedule.next_for(slot) for slot in (0, 1, 0, 1, 0, 1)] == [0, 3, 1, 4, 2, 5]


def test_a_slot_without_a_stream_of_its_own_leaves_others_streams_alone():
    schedule = ChunkSchedule(range(4), dict.fromkeys(range(4), "a"), always_mine)
    assert [schedule.next_for(slot) for slot in (0, 1, 1, 0, 1, 0, 0)] == [0, None, None, 1, None, 2, 3]


def test_a_stream_is_read_forward_even_when_the_build_goes_backward():
    schedule = ChunkSchedule([5, 4, 3, 2, 1, 0], {2: "a", 3: "a"}, always_mine)
    handed = [schedule.next_for(0) for _ in range(6)]
    assert handed.index(2) == handed.index(3) - 1
    assert [chunk for chunk in handed if chunk not in (2, 3)] == [5, 4, 1, 0]


def test_the_stream_of_a_slot_that_is_gone_goes_on_in_order_in_another():
    schedule = ChunkSchedule(range(5), dict.fromkeys(range(5), "a"), always_mine)
    assert schedule.next_for(0) == 0
    schedule.keep({1})
    assert [schedule.next_for(1) for _ in range(4)] == [1, 2, 3, 4]


def test_a_chunk_that_is_given_back_is_the_next_of_its_stream():
    schedule = ChunkSchedule(range(5), dict.fromkeys(range(5), "a"), always_mine)
    assert [schedule.next_for(0), schedule.next_for(0)] == [0, 1]
    schedule.give_back(1)
    schedule.keep({1})
    assert [schedule.next_for(1) for _ in range(5)] == [1, 2, 3, 4, None]
    schedule.give_back(4)
    schedule.keep({2})
    assert [schedule.next_for(2), schedule.next_for(2), schedule.pending] == [4, None, 0]


def test_what_others_hold_is_set_aside_until_it_is_looked_at_again():
    answers = {0: "busy", 1: "done", 2: "mine"}
    schedule = ChunkSchedule(range(3), {}, answers.__getitem__)
    assert [schedule.next_for(0), schedule.next_for(0)] == [2, None]
    assert schedule.elsewhere == [0]
    answers[0] = "mine"
    assert schedule.next_for(0) is None
    schedule.look_again()
    assert schedule.next_for(0) == 0
    assert schedule.elsewhere == []


@given(
    chunks=st.lists(st.integers(0, 30), unique=True),
    streams=st.dictionaries(st.integers(0, 30), st.sampled_from("abc")),
    asks=st.lists(st.integers(0, 3), max_size=80),
    gone=st.sets(st.integers(0, 79)),
)
def test_every_chunk_is_handed_out_once_whoever_asks_and_whoever_leaves(chunks, streams, asks, gone):
    schedule = ChunkSchedule(chunks, streams, always_mine)
    handed = []
    for turn, slot in enumerate(asks):
        if turn in gone:
            schedule.keep({other for other in range(4) if other != slot})
        handed.append(schedule.next_for(slot))
    schedule.keep({9})
    while (chunk := schedule.next_for(9)) is not None:
        handed.append(chunk)
    assert sorted(chunk for chunk in handed if chunk is not None) == sorted(chunks)
    assert schedule.pending == 0
