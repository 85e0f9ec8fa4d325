"""Schedule: the figures, the warning, and growth, through torch's own scheduler."""

import io
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.token_caches import grow_cache, token_cache
from torch.optim.lr_scheduler import LambdaLR

import forebay as fb
from forebay.torch import CacheDataset, Loader, Schedule, Split


def document_schedule(rows: int, **options: object) -> Schedule:
    """As the document of the token cache has it."""
    return Schedule(rows, epochs=5, effective_batch=72, train_fraction=0.8, full_rows=2_500_000, **options)


def scheduler_of(schedule: Schedule) -> LambdaLR:
    return LambdaLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), schedule)


def rates(scheduler: LambdaLR, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("rows", "total"), [(352_217, 19_567), (472_240, 26_235), (1_571_666, 87_314), (2_500_000, 138_888)]
)
def test_the_steps_of_the_document_and_its_warm_up(rows: int, total: int) -> None:
    schedule = document_schedule(rows)
    assert (schedule.total, schedule.warmup) == (total, 3_472)


def test_growth_moves_the_total_and_never_the_warm_up() -> None:
    schedule = document_schedule(352_217)
    for step, rows, total in [(10_000, 472_240, 26_235), (20_000, 1_571_666, 87_314), (60_000, 2_500_000, 138_888)]:
        schedule(step)
        assert schedule.update(rows) == schedule.total == total
        assert schedule.multiplier(step) == document_schedule(rows).multiplier(step)
        assert schedule.warmup == 3_472
    assert schedule.multiplier(138_888) == pytest.approx(0.1)


def test_the_multiplier_rises_to_one_and_falls_to_its_floor() -> None:
    schedule = Schedule(110, epochs=1, effective_batch=1, full_rows=400)
    assert [schedule.multiplier(step) for step in (0, 5, 10)] == [0, 0.5, 1]
    assert schedule.multiplier(60) == pytest.approx(0.55)
    assert [schedule.multiplier(step) for step in (110, 500)] == [pytest.approx(0.1)] * 2
    linear = Schedule(110, epochs=1, effective_batch=1, full_rows=400, floor=0.0, decay="linear")
    assert linear.multiplier(35) == pytest.approx(0.75)


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 9), st.integers(1, 100), st.integers(1, 10**5))
def test_shares_are_taken_as_they_are_written(rows: int, epochs: int, percent: int, batch: int) -> None:
    schedule = Schedule(rows, epochs=epochs, train_fraction=percent / 100, effective_batch=batch)
    assert schedule.total == rows * epochs * percent // (100 * batch)


def test_a_partial_cache_is_a_warning_once() -> None:
    with pytest.warns(UserWarning, match=r"partial: the warm-up of 3,472 steps is longer than the 555 steps"):
        schedule = document_schedule(10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.update(20_000)


def test_rows_that_are_no_number_are_refused() -> None:
    assert Schedule(np.int64(20), epochs=1, effective_batch=4).total == 5
    with pytest.raises(ValueError, match=r"rows must be a whole number of at least 0 \(got \[1, 2\]\)"):
        Schedule([1, 2], epochs=1, effective_batch=4)  # type: ignore[arg-type]


def test_the_rows_of_a_loader_are_those_it_selects(tmp_path: Path) -> None:
    cache = fb.open_cache(token_cache(tmp_path, 100))
    loader = Loader(cache, global_batch_size=7, selection=Split("train", fraction=0.5), threads=0)
    schedule = Schedule(loader, epochs=3, effective_batch=7)
    assert schedule.total == 3 * len(CacheDataset(cache, selection=Split("train", fraction=0.5))) // 7
    assert schedule.total != 3 * len(loader)


def test_fewer_rows_than_before_are_refused_and_change_nothing() -> None:
    schedule = Schedule(100, epochs=2, effective_batch=1)
    schedule(50)
    with pytest.raises(ValueError, match="90 rows make 180 steps, fewer than the 200 before"):
        schedule.update(90)
    assert schedule.total == 200


def test_torch_drives_it_and_a_resumed_run_grows() -> None:
    options = {"epochs": 1, "effective_batch": 1, "full_rows": 400}
    schedule = Schedule(100, **options)
    scheduler = scheduler_of(schedule)
    first = rates(scheduler, 60)
    assert first[:12] == pytest.approx([*(step / 10 for step in range(11)), schedule.multiplier(11)])
    kept = io.BytesIO()
    torch.save({"scheduler": scheduler.state_dict(), "optimizer": scheduler.optimizer.state_dict()}, kept)
    kept.seek(0)
    state = torch.load(kept, weights_only=True)

    resumed = Schedule(300, **options)
    again = scheduler_of(resumed)
    again.optimizer.load_state_dict(state["optimizer"])
    again.load_state_dict(state["scheduler"])
    assert (resumed.step, resumed.total) == (60, 100)
    assert again.get_last_lr() == [pytest.approx(schedule.multiplier(60))]
    assert resumed.update(300) == 300
    second = rates(again, 241)
    assert second[1:] == pytest.approx([Schedule(300, **options).multiplier(step) for step in range(61, 301)])


def test_the_state_is_json() -> None:
    schedule = document_schedule(352_217)
    schedule(10_000)
    schedule.update(472_240)
    state = json.loads(json.dumps(schedule.state_dict()))
    assert state == {"warmup": 3_472, "total": 26_235, "step": 10_000}
    resumed = document_schedule(472_240)
    resumed.load_state_dict(state)
    for step in (0, 3_472, 9_999, 10_000, 20_000, 26_235):
        assert resumed.multiplier(step) == schedule.multiplier(step)


def test_what_is_asked_for_now_is_not_overwritten_by_what_was_asked_for_then() -> None:
    old = scheduler_of(Schedule(100, epochs=1, effective_batch=1))
    resumed = Schedule(100, epochs=3, effective_batch=1)
    new = scheduler_of(resumed)
    new.load_state_dict(old.state_dict())
    assert resumed.total == 100, "as the state has it"
    assert resumed.update(100) == 300


def test_terms_that_make_no_schedule_are_refused() -> None:
    options = {"epochs": 0, "effective_batch": 0, "train_fraction": 2.0, "warmup_share": 1, "floor": 2, "decay": "step"}
    for name, wrong in options.items():
        with pytest.raises(ValueError, match=rf"{name} must be .* \(got"):
            Schedule(100, **{"epochs": 1, "effective_batch": 1, name: wrong})
    with pytest.raises(ValueError, match="rows must be"):
        Schedule(-1, epochs=1, effective_batch=1)


def test_a_schedule_of_a_loader_follows_the_cache_and_is_restored_with_it(tmp_path: Path) -> None:
    root = token_cache(tmp_path, 100)
    loader = Loader(root, global_batch_size=10, seed=0, growth="epoch")
    schedule = Schedule.for_loader(loader, epochs=4, full_estimate=400, warmup_share=0.05)
    scheduler = scheduler_of(schedule)
    assert (schedule.total, schedule.warmup) == (40, 8)
    batches = loader.forever()
    for _ in range(5):
        next(batches)
    rates(scheduler, 5)
    grow_cache(tmp_path, 100, 60)
    kept = json.loads(json.dumps(loader.state_dict()))
    rest = [next(batches) for _ in range(6)]
    assert len(rest) == 6
    later = rates(scheduler, 6)
    assert (schedule.total, schedule.warmup) == (64, 8), "as for the larger cache, with the old warm-up"

    again = Loader(root, global_batch_size=10, seed=0, growth="epoch")
    resumed = Schedule.for_loader(again, epochs=4, full_estimate=400, warmup_share=0.05)
    again.load_state_dict(kept)
    assert (resumed.step, resumed.total, resumed.warmup) == (5, 40, 8)
    assert resumed(5) == pytest.approx(later[0])
    assert resumed.total == 64, "the loader has seen the growth while it resumed"
