"""L1 holds what was used last, and never more bytes than it may."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.row_cache.memory import MemoryRows

KEYS = [bytes([number]) for number in range(6)]
STEPS = st.lists(st.tuples(st.sampled_from(KEYS), st.one_of(st.none(), st.integers(0, 12))), max_size=60)


@given(limit=st.integers(0, 30), steps=STEPS)
def test_it_holds_exactly_the_values_used_last_that_fit(limit: int, steps: list[tuple[bytes, int | None]]) -> None:
    """Held against the definition: a list by time of use, cut from its old end whenever it weighs too much."""
    rows: MemoryRows[object] = MemoryRows(limit)
    model: list[tuple[bytes, object, int]] = []  # oldest first
    for key, size in steps:
        entry_of_key = next((entry for entry in model if entry[0] == key), None)
        if size is None:
            assert rows.get(key) is (entry_of_key and entry_of_key[1])
            if entry_of_key:
                model.remove(entry_of_key)
                model.append(entry_of_key)
        elif size <= limit:
            value = object()
            rows.put(key, value, size)
            model = [entry for entry in model if entry[0] != key]
            while sum(entry[2] for entry in model) + size > limit:
                model.pop(0)
            model.append((key, value, size))
        else:
            rows.put(key, object(), size)
        assert rows.bytes == sum(entry[2] for entry in model) <= limit
        assert len(rows) == len(model)
