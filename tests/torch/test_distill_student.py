"""Flow matching helpers, and the modules of examples/teacher_predictors.py."""

import math
import runpy
from pathlib import Path

import pytest
import torch

from forebay.torch.distill import (
    TeacherRows,
    interpolate,
    sample_times,
    shift_times,
    sol_loss,
    velocity,
)

PREDICTORS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "teacher_predictors.py"))
LunePredictor, SolPrior, embed_times = (PREDICTORS[name] for name in ("LunePredictor", "SolPrior", "embed_times"))

pytestmark = pytest.mark.usefixtures("one_thread")


def test_x_t_is_noise_at_0_and_data_at_1_and_goes_straight_along_the_velocity() -> None:
    data, noise = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4)
    times = torch.tensor([0.0, 1.0, 0.25])
    x = interpolate(data, noise, times)
    assert torch.equal(x[0], noise[0])
    assert torch.equal(x[1], data[1])
    assert torch.allclose(x[2], 0.75 * noise[2] + 0.25 * data[2])
    later = interpolate(data, noise, torch.tensor([0.5, 1.0, 0.5]))
    assert torch.allclose(x[2] + 0.25 * velocity(data, noise)[2], later[2], atol=1e-6)


def test_following_the_velocity_from_noise_ends_at_the_data() -> None:
    data, noise = torch.randn(2, 3), torch.randn(2, 3)
    x = noise.clone()
    for _ in range(10):
        x += velocity(data, noise) / 10
    assert torch.allclose(x, data, atol=1e-5)


def test_a_shift_moves_times_towards_the_data_keeps_their_order_and_is_undone_by_its_inverse() -> None:
    times = torch.linspace(0, 1, 101, dtype=torch.float64)
    shifted = shift_times(times)
    assert shifted[50].item() == 0.75
    assert (shifted.diff() > 0).all()
    assert (shifted[1:-1] > times[1:-1]).all()
    assert torch.allclose(shift_times(shifted, 1 / 3), times)
    assert torch.equal(shift_times(times, 1.0), times)
    with pytest.raises(ValueError, match="shift must be more than 0"):
        shift_times(times, 0)


@pytest.mark.parametrize(("distribution", "quartiles"), [("logit_normal", (-0.6745, 0.0, 0.6745)), ("uniform", None)])
def test_sampled_times_follow_their_distribution(distribution: str, quartiles: tuple[float, ...] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    times = sample_times(100_000, distribution=distribution, generator=generator)  # type: ignore[arg-type]
    plain = torch.sigmoid(torch.tensor(quartiles)) if quartiles else torch.tensor([0.25, 0.5, 0.75])
    found = torch.quantile(times, torch.tensor([0.25, 0.5, 0.75]))
    assert found.tolist() == pytest.approx(shift_times(plain).tolist(), abs=0.01)
    assert times.dtype == torch.float32
    assert times.min() >= 1e-4
    assert times.max() <= 1 - 1e-4


def test_a_seed_gives_the_same_times_and_an_unknown_distribution_is_an_error() -> None:
    one, other = (sample_times(5, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, other)
    with pytest.raises(ValueError, match="distribution must be 'logit_normal' or 'uniform'"):
        sample_times(5, distribution="cubic")  # type: ignore[arg-type]


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
