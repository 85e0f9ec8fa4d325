"""Times of flow matching, and the modules of examples/teacher_predictors.py."""

import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from forebay.order.coins import Coins
from forebay.torch.distill import LogitNormalTimes, TeacherRows, sol_loss

PREDICTORS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "teacher_predictors.py"))
LunePredictor, SolPrior, embed_times = (PREDICTORS[name] for name in ("LunePredictor", "SolPrior", "embed_times"))

pytestmark = pytest.mark.usefixtures("one_thread")


def test_times_are_logit_normal_and_shifted_towards_the_data() -> None:
    coins = Coins(0, 0, np.arange(100_000, dtype=np.uint64))
    times = torch.from_numpy(LogitNormalTimes(shift=3.0)(coins))
    plain = torch.sigmoid(torch.tensor([-0.6745, 0.0, 0.6745]))
    quartiles = torch.quantile(times, torch.tensor([0.25, 0.5, 0.75]))
    assert quartiles.tolist() == pytest.approx((3 * plain / (1 + 2 * plain)).tolist(), abs=0.01)
    assert times.dtype == torch.float32
    assert 1e-4 <= times.min() <= times.max() <= 1 - 1e-4
    with pytest.raises(ValueError, match="shift must be a number above 0"):
        LogitNormalTimes(shift=0)


def test_embedded_times_are_told_apart() -> None:
    embedded = embed_times(torch.linspace(0, 1, 50), 32)
    distances = torch.cdist(embedded, embedded) + math.inf * torch.eye(50).nan_to_num(0)
    assert embedded.shape == (50, 32)
    assert distances.nan_to_num(math.inf).min() > 0.1
    with pytest.raises(ValueError, match="pairs"):
        embed_times(torch.zeros(1), 31)


def test_the_prior_predicts_maps_on_the_scale_of_the_teacher() -> None:
    torch.manual_seed(0)
    signal = SolPrior(8, 6)(50 * torch.randn(5, 8), torch.randn(5, 6))
    assert signal.spatial_predicted.shape == (5, 8, 8)
    assert torch.allclose(signal.spatial_predicted.sum(dim=(1, 2)), torch.ones(5))
    assert (signal.spatial_predicted >= 0).all()
    assert ((signal.stats_predicted >= 0) & (signal.stats_predicted <= 1)).all()
    assert torch.equal(signal.spatial, signal.spatial_predicted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = SolPrior(8, 6)(torch.randn(5, 8), torch.randn(5, 6))
    assert torch.allclose(rounded.spatial_predicted.sum(dim=(1, 2)), torch.ones(5), atol=1e-6)


def test_the_prior_learns_what_the_teacher_says() -> None:
    torch.manual_seed(0)
    prior = SolPrior(8, 6)
    time, text = torch.randn(4, 8), torch.randn(4, 6)
    stats, maps = torch.rand(4, 4), torch.rand(4, 64).softmax(-1).view(4, 8, 8)
    optimizer = torch.optim.Adam(prior.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        signal = prior(time, text)
        loss = sol_loss(signal.stats_predicted, signal.spatial_predicted, stats, maps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 50


def test_the_student_goes_on_with_the_teacher_where_it_is_present_and_with_itself_elsewhere() -> None:
    torch.manual_seed(0)
    predictor = LunePredictor(8, 6, feature_dim=10, hidden_dim=16, signal_dim=7)
    time, text = torch.randn(2, 8), torch.randn(2, 6)
    alone = predictor(time, text)
    teacher = TeacherRows(torch.randn(2, 10).half(), torch.tensor([True, True])).where(torch.tensor([True, False]))
    guided = predictor(time, text, teacher)
    assert torch.equal(guided.predicted, alone.predicted)
    assert torch.equal(guided.signal[1], alone.signal[1])
    assert torch.allclose(guided.signal[0], predictor.project(teacher.values[:1].float())[0])
    assert guided.signal.shape == (2, 7)
    guided.signal.sum().backward()
    assert all(p.grad.isfinite().all() for p in predictor.parameters() if p.grad is not None)


def test_the_prior_takes_the_teachers_word_row_by_row() -> None:
    torch.manual_seed(0)
    prior = SolPrior(8, 6)
    kept = torch.tensor([False, True])
    stats = TeacherRows(torch.rand(2, 4), torch.ones(2, dtype=torch.bool)).where(kept)
    maps = TeacherRows(torch.rand(2, 8, 8), torch.ones(2, dtype=torch.bool)).where(kept)
    signal = prior(torch.randn(2, 8), torch.randn(2, 6), stats, maps)
    assert torch.equal(signal.stats[1], stats.values[1])
    assert torch.equal(signal.spatial[1], maps.values[1])
    assert torch.equal(signal.stats[0], signal.stats_predicted[0])
    assert torch.equal(signal.spatial[0], signal.spatial_predicted[0])
