"""Coins: a function of seed, epoch, row and purpose, pinned for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.order.coins import Coins, philox, row_keys

numbers = st.integers(0, 2**31 - 1)
row_names = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20, unique=True)


def coins_of(names: list[tuple[int, int]], seed: int = 0, epoch: int = 0) -> Coins:
    return Coins(seed, epoch, row_keys([chunk for chunk, _ in names], [row for _, row in names]))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, (2**32 - 1, 2**32 - 1), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_generator_gives_the_words_its_authors_published(
    counter: list[int], key: tuple[int, int], words: str
) -> None:
    first, second, third, fourth = (np.array([part], np.uint64) for part in counter)
    found = philox((first, second, third, fourth), key)
    assert " ".join(f"{int(word[0]):08x}" for word in found) == words


def test_coins_are_what_they_always_were() -> None:
    coins = coins_of([(0, 0), (0, 1), (7, 5), (2**31 - 1, 2**32 - 1)], seed=42, epoch=3)
    assert [f"{word:016x}" for word in coins.words("crop").tolist()] == GOLDEN_WORDS
    assert coins.flip("mirror").tolist() == GOLDEN_FLIPS
    assert coins.integers("crop", 0, 100, (2,)).tolist() == GOLDEN_INTEGERS


GOLDEN_WORDS = ["9ee50684c86712bb", "b3697ca5ca285167", "4baf58d9163dffd0", "c992ca89090a1196"]
GOLDEN_FLIPS = [True, True, True, False]
GOLDEN_INTEGERS = [[62, 82], [70, 4], [29, 54], [78, 97]]


@settings(deadline=None)
@given(row_names, numbers, st.integers(0, 2**32 - 1), st.text(max_size=8), st.data())
def test_a_coin_does_not_depend_on_the_rows_beside_it(
    names: list[tuple[int, int]], seed: int, epoch: int, purpose: str, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(names) - 1), max_size=10))
    whole = coins_of(names, seed, epoch).words(purpose, (3,))
    part = coins_of([names[index] for index in chosen], seed, epoch).words(purpose, (3,))
    assert part.tolist() == whole[chosen].tolist()


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(0, 9))
def test_fewer_draws_are_the_beginning_of_more(fewer: int, more: int) -> None:
    coins = coins_of([(1, 2), (3, 4)])
    few, many = coins.words("crop", (min(fewer, more),)), coins.words("crop", (max(fewer, more),))
    assert few.tolist() == many[:, : min(fewer, more)].tolist()


def test_seed_epoch_row_and_purpose_each_change_all_coins() -> None:
    rows = row_keys(np.zeros(1000, np.int64), np.arange(1000))
    base = Coins(1, 1, rows).words("a")
    others = [
        Coins(2, 1, rows).words("a"),
        Coins(1, 2, rows).words("a"),
        Coins(1, 1, rows).words("b"),
        Coins(1, 1, rows + np.uint64(2**32)).words("a"),
    ]
    for other in others:
        assert not np.isin(other, base).any()
    assert len(np.unique(base)) == 1000


def test_coins_are_evenly_spread_and_independent_of_their_neighbors() -> None:
    rows = row_keys(np.arange(100_000) // 1000, np.arange(100_000) % 1000)
    uniform = Coins(0, 0, rows).uniform("mix", (2,))
    assert uniform.min() >= 0
    assert uniform.max() < 1
    counts = np.histogram(uniform, bins=100, range=(0, 1))[0]
    assert (((counts - 2000) ** 2) / 2000).sum() < 160  # 99 degrees of freedom: beyond 160 is one in ten thousand
    assert abs(np.corrcoef(uniform[:-1, 0], uniform[1:, 0])[0, 1]) < 0.015
    assert abs(np.corrcoef(uniform[:, 0], uniform[:, 1])[0, 1]) < 0.015


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_a_flip_comes_as_often_as_asked(probability: float) -> None:
    flips = Coins(0, 0, row_keys(np.zeros(20_000, np.int64), np.arange(20_000))).flip("drop", probability)
    assert abs(flips.mean() - probability) < 0.015
    assert probability in (flips.mean(), 0.1, 0.5)  # never and always are exact
    assert flips.dtype == np.bool_


@settings(deadline=None)
@given(st.integers(-(2**40), 2**40), st.integers(1, 2**32))
def test_integers_stay_in_their_range(low: int, count: int) -> None:
    drawn = coins_of([(0, row) for row in range(50)]).integers("crop", low, low + count)
    assert ((drawn >= low) & (drawn < low + count)).all()


def test_every_integer_of_a_range_is_drawn() -> None:
    rows = row_keys(np.zeros(2000, np.int64), np.arange(2000))
    assert set(Coins(0, 0, rows).integers("crop", -3, 4).tolist()) == set(range(-3, 4))


def test_every_row_may_have_an_epoch_of_its_own() -> None:
    names = [(0, 1), (4, 2), (4, 3)]
    each = Coins(0, np.array([7, 0, 2]), coins_of(names).rows).words("crop", (3,))
    assert each.tolist() == [
        coins_of([name], 0, epoch).words("crop", (3,))[0].tolist() for name, epoch in zip(names, (7, 0, 2), strict=True)
    ]


def test_what_is_no_share_range_or_epoch_is_refused() -> None:
    coins = coins_of([(0, 0)])
    with pytest.raises(ValueError, match=r"probability must be from 0 to 1 \(got 2\)"):
        coins.flip("mirror", 2)
    with pytest.raises(ValueError, match=r"high - low must be from 1 to 2\*\*32 \(got low=3, high=3\)"):
        coins.integers("crop", 3, 3)
    with pytest.raises(ValueError, match=r"epoch must be from 0 to below 2\*\*32 \(got -1\)"):
        coins_of([(0, 0)], epoch=-1).uniform("mix")
