"""L1 holds what was used last, and never more bytes than it may."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.tiers.cached_images import MemoryTier

KEYS = [bytes([number]) for number in range(6)]
STEPS = st.lists(st.tuples(st.sampled_from(KEYS), st.one_of(st.none(), st.integers(0, 12))), max_size=60)


@given(limit=st.integers(0, 30), steps=STEPS)
def test_it_holds_exactly_the_values_used_last_that_fit(limit: int, steps: list[tuple[bytes, int | None]]) -> None:
    """Held against the definition: a list by time of use, cut from its old end whenever it weighs too much."""
    tier: MemoryTier[object] = MemoryTier(limit)
    model: list[tuple[bytes, object, int]] = []  # oldest first
    for key, size in steps:
        kept = next((entry for entry in model if entry[0] == key), None)
        if size is None:
            assert tier.get(key) is (kept and kept[1])
            if kept:
                model.remove(kept)
                model.append(kept)
        elif size <= limit:
            value = object()
            tier.put(key, value, size)
            model = [entry for entry in model if entry[0] != key]
            while sum(entry[2] for entry in model) + size > limit:
                model.pop(0)
            model.append((key, value, size))
        else:
            tier.put(key, object(), size)
        assert tier.bytes == sum(entry[2] for entry in model) <= limit
        assert len(tier) == len(model)


def test_a_value_larger_than_the_tier_drives_nothing_out() -> None:
    tier: MemoryTier[str] = MemoryTier(10)
    tier.put(b"a", "small", 4)
    tier.put(b"b", "large", 11)
    assert (tier.get(b"a"), tier.get(b"b"), tier.evicted) == ("small", None, 0)
