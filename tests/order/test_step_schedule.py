"""Steps, warm-up and the multiplier: the figures hold exactly, and nothing jumps when the data grows."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled

from forebay.torch.schedule import Multiplier, training_steps, warmup_steps


@pytest.mark.parametrize(
    ("sequences", "steps"),
    [(352_217, 19_567), (472_240, 26_235), (1_571_666, 87_314), (2_500_000, 138_888)],
)
def test_the_figures_of_the_token_cache_hold(sequences: int, steps: int) -> None:
    assert training_steps(sequences, epochs=5, train_fraction=0.8, effective_batch=72) == steps


def test_the_warm_up_is_a_share_of_the_full_data() -> None:
    assert warmup_steps(training_steps(2_500_000, 5, 0.8, 72), 0.025) == 3_472


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 9), st.integers(1, 100), st.integers(1, 10**5))
def test_shares_are_taken_as_they_are_written(sequences: int, epochs: int, percent: int, batch: int) -> None:
    assert training_steps(sequences, epochs, percent / 100, batch) == sequences * epochs * percent // (100 * batch)


def test_the_multiplier_rises_to_one_and_falls_to_its_floor() -> None:
    multiplier = Multiplier(warmup=10, totals=((0, 110),), floor=0.1)
    assert [multiplier(step) for step in (0, 5, 10)] == [0, 0.5, 1]
    assert multiplier(60) == pytest.approx(0.55)
    assert [multiplier(step) for step in (110, 500)] == [pytest.approx(0.1)] * 2
    linear = Multiplier(warmup=10, totals=((0, 110),), floor=0.0, decay="linear")
    assert linear(35) == pytest.approx(0.75)


def test_after_a_growth_the_multiplier_moves_to_that_of_a_run_with_the_new_total() -> None:
    before, fresh = Multiplier(10, ((0, 110),)), Multiplier(10, ((0, 1000),))
    for step in (60, 110, 150):
        after = Multiplier(10, ((0, 110), (step, 1000)), rewarm=50)
        assert [after(at) for at in range(step)] == [before(at) for at in range(step)]
        assert after(step) == pytest.approx(before(step))
        rise = [after(at) for at in range(step, step + 51)]
        assert all(later > earlier for earlier, later in pairwise(rise))
        following = range(step + 50, 1001)
        assert [after(at) for at in following] == pytest.approx([fresh(at) for at in following])


def test_a_growth_during_the_warm_up_only_moves_the_end() -> None:
    grown = Multiplier(warmup=100, totals=((0, 300), (40, 900)))
    whole = Multiplier(warmup=100, totals=((0, 900),))
    assert [grown(step) for step in range(901)] == [whole(step) for step in range(901)]


growths = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 800)), max_size=5)


@settings(deadline=None, max_examples=scaled(40))
@given(st.integers(0, 60), st.integers(70, 300), growths, st.sampled_from(["cosine", "linear"]), st.integers(20, 80))
def test_no_growth_makes_the_multiplier_jump(
    warmup: int, first: int, grown: list[tuple[int, int]], decay: str, rewarm: int
) -> None:
    totals, step, total = [(0, first)], 0, first
    for wait, added in grown:
        step += wait
        total = max(total, step) + added + rewarm
        totals.append((step, total))
    for known in range(1, len(totals) + 1):
        after = Multiplier(warmup, tuple(totals[:known]), 0.1, decay, rewarm)  # type: ignore[arg-type]
        values = [after(step) for step in range(warmup, total + 1)]
        shortest = min(rewarm, first - warmup)
        assert all(abs(later - earlier) < 1.5 / shortest + 1e-9 for earlier, later in pairwise(values))
        assert all(0.1 - 1e-9 <= value <= 1 for value in values)
        if known > 1:
            before = Multiplier(warmup, tuple(totals[: known - 1]), 0.1, decay, rewarm)  # type: ignore[arg-type]
            assert after(totals[known - 1][0]) == pytest.approx(before(totals[known - 1][0]))


def test_what_makes_no_schedule_is_refused() -> None:
    wrong = {"rows": (-1, 1, 0.8, 1), "epochs": (1, 0, 0.8, 1), "train_fraction": (1, 1, 2, 1)}
    for name, numbers in (wrong | {"effective_batch": (1, 1, 0.8, 0)}).items():
        with pytest.raises(ValueError, match=f"{name} must be"):
            training_steps(*numbers)
    with pytest.raises(ValueError, match="warmup_share must be"):
        warmup_steps(10, 1)
    with pytest.raises(ValueError, match="rewarm must be at least 1"):
        Multiplier(10, ((0, 100),), rewarm=0)
    with pytest.raises(ValueError, match="must begin at step 0"):
        Multiplier(10, ((5, 100),))
    for wrong in (((0, 100), (50, 90)), ((0, 100), (50, 200), (40, 300))):
        with pytest.raises(ValueError, match="may decrease"):
            Multiplier(10, wrong)


def test_with_few_steps_left_it_rises_over_half_of_them() -> None:
    after, fresh = (Multiplier(0, totals, rewarm=100) for totals in (((0, 200), (200, 240)), ((0, 240),)))
    assert after(210) == pytest.approx((0.1 + fresh(210)) / 2)
    assert [after(step) for step in (220, 230, 240)] == pytest.approx([fresh(step) for step in (220, 230, 240)])
