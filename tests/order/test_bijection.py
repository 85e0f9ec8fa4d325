"""The computed shuffle: one to one, the same for ever, and as random as a drawn one."""

from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.order.shuffle import key_of, mix, permute, permute_each

keys = st.integers(0, 2**64 - 1)

GOLDEN_TEN = [7, 9, 8, 1, 4, 2, 5, 3, 6, 0]
GOLDEN_MANY = [6252035, 29012984, 54778535, 8494066, 11999504]
GOLDEN_MIX = [16294208416658607535, 10451216379200822465]


@given(size=st.integers(1, 3000) | st.integers(4000, 5000), key=keys)
def test_every_index_is_hit_once(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@given(size=st.integers(1, 2**52), key=keys, part=st.lists(st.integers(0, 2**52), max_size=20))
def test_no_index_depends_on_which_others_are_asked_for(size: int, key: int, part: list[int]) -> None:
    indices = np.array([index % size for index in part], np.int64)
    together = permute(indices, size, key)
    assert together.tolist() == [int(permute(np.array([index]), size, key)[0]) for index in indices]
    assert ((together >= 0) & (together < size)).all()


@given(
    cases=st.lists(st.tuples(st.integers(1, 500) | st.integers(4090, 4110), keys), min_size=1, max_size=20),
    data=st.data(),
)
def test_shuffles_of_each_index_are_those_of_one_call_each(cases: list[tuple[int, int]], data: st.DataObject) -> None:
    which = np.array(data.draw(st.lists(st.integers(0, len(cases) - 1), max_size=20)), np.int64)
    sizes, each = np.array([size for size, _ in cases]), np.array([key for _, key in cases], np.uint64)
    indices = np.array([data.draw(st.integers(0, int(sizes[case]) - 1)) for case in which], np.int64)
    singly = [int(permute(indices[at : at + 1], *cases[case])[0]) for at, case in enumerate(which.tolist())]
    assert permute_each(indices, which, sizes, each).tolist() == singly


def test_the_shuffle_is_the_same_in_every_release() -> None:
    assert permute(np.arange(10), 10, key_of("order", 0, 0, 0)).tolist() == GOLDEN_TEN
    assert permute(np.arange(5) + 90_000_000, 100_000_000, key_of("order", 7, 3, 0)).tolist() == GOLDEN_MANY
    assert mix(np.array([0, 1], np.uint64)).tolist() == GOLDEN_MIX


@pytest.mark.parametrize(
    ("size", "each"),
    [(2, 400), (3, 400), (4, 100), (5, 20), (6, 10), (7, 2), pytest.param(8, 1, marks=pytest.mark.long)],
)
def test_all_orders_of_a_few_are_about_as_frequent(size: int, each: int) -> None:
    places = np.unique(shuffles(size, each * factorial(size)) @ size ** np.arange(size), return_counts=True)[1]
    counts = np.pad(places, (0, factorial(size) - len(places)))
    freedom = factorial(size) - 1
    assert abs(chi_square(counts, each) - freedom) < 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [7, 9, 13, 25])
def test_every_pair_of_places_is_about_as_frequent(size: int) -> None:
    first, second = shuffles(size, 20 * size * (size - 1))[:, :2].T
    counts = np.bincount(first * size + second, minlength=size * size).reshape(size, size)[~np.eye(size, dtype=bool)]
    freedom = size * (size - 1) - 1
    assert chi_square(counts, 20) < freedom + 5 * np.sqrt(2 * freedom)


def test_neighbours_end_up_at_distances_as_random_as_any() -> None:
    size = 10_007
    distances = np.concatenate(
        [np.diff(permute(np.arange(size), size, key_of("pairs", number))) % size for number in range(50)]
    )
    counts, _ = np.histogram(distances, bins=100, range=(0, size))
    assert chi_square(counts, len(distances) / 100) < 160  # 99 degrees of freedom, p = 0.0001


def test_keys_that_differ_in_one_bit_give_unrelated_shuffles() -> None:
    size = 10_000
    first = permute(np.arange(size), size, 0)
    for bit in range(64):
        other = permute(np.arange(size), size, 1 << bit)
        assert (first == other).sum() < 12, "one index in 10,000 keeps its place by chance"
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.05


def test_the_low_bits_of_the_result_do_not_follow_those_of_the_index() -> None:
    placed = permute(np.arange(1 << 16), 1 << 16, key_of("bits"))
    for bit_in in range(16):
        for bit_out in range(16):
            agree = ((np.arange(1 << 16) >> bit_in & 1) == (placed >> bit_out & 1)).mean()
            assert abs(agree - 0.5) < 0.012  # six standard deviations


def shuffles(size: int, count: int) -> np.ndarray:
    """So many shuffles, `(count, size)`, of keys as unlike as seeds and epochs make them."""
    each = mix(np.arange(count, dtype=np.uint64)).tolist()
    return np.array([permute(np.arange(size), size, key) for key in each])


def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())
