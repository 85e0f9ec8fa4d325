"""Losses of a student against its teachers: the formulas, absent rows, and the weights of places, rows and steps."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled

from forebay.torch.distill import (
    TeacherRows,
    Warmup,
    feature_loss,
    loss_weights,
    sol_loss,
    spatial_weights,
)

MODES = ("cosine", "mse", "huber")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_definition(mode: str, predicted: np.ndarray, target: np.ndarray) -> float:
    """One row, in float64."""
    difference = np.abs(predicted - target)
    if mode == "cosine":
        return float(1 - predicted @ target / np.linalg.norm(predicted) / np.linalg.norm(target))
    if mode == "mse":
        return float(np.mean(difference**2))
    near = np.minimum(difference, 0.1)
    return float(np.mean(0.5 * near**2 + 0.1 * (difference - near)))


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=scaled(40))
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.01, 0.3, 5.0]), bits=st.integers(0, 15))
def test_a_loss_is_the_mean_of_its_formula_over_the_rows_that_are_present(
    mode: str, seed: int, scale: float, bits: int
) -> None:
    predicted, target = scale * drawn(4, 6, seed=seed), scale * drawn(4, 6, seed=seed + 1)
    present = torch.tensor([bool(bits >> row & 1) for row in range(4)])
    rows = [
        by_definition(mode, *pair)
        for pair, there in zip(
            zip(predicted.double().numpy(), target.double().numpy(), strict=True), present, strict=True
        )
        if there
    ]
    expected = sum(rows) / len(rows) if rows else 0.0
    found = feature_loss(predicted, TeacherRows(target, present), mode).item()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_what_stands_in_an_absent_row_moves_neither_loss_nor_gradient(mode: str) -> None:
    predicted, target = drawn(3, 5).requires_grad_(), drawn(3, 5, seed=1)
    rows = TeacherRows(target, torch.ones(3, dtype=torch.bool)).where(torch.tensor([True, False, True]))
    assert rows.values[1].isnan().all()
    loss = feature_loss(predicted, rows, mode)
    loss.backward()
    assert loss.item() == pytest.approx(feature_loss(predicted[[0, 2]], target[[0, 2]], mode).item())
    assert loss.item() == feature_loss(predicted, rows.values, mode).item(), "NaN marks absent rows of a tensor"
    assert predicted.grad is not None
    assert predicted.grad.isfinite().all()
    assert (predicted.grad[1] == 0).all()
    assert (predicted.grad[0] != 0).any()


def test_with_no_row_present_the_loss_is_nothing_and_moves_nothing() -> None:
    predicted = drawn(2, 5).requires_grad_()
    absent = torch.full((2, 5), torch.nan)
    loss = feature_loss(predicted, absent)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(predicted.grad, torch.zeros(2, 5))


def test_huber_is_square_up_to_a_tenth_and_straight_beyond() -> None:
    losses = [feature_loss(torch.tensor([[d]]), torch.zeros(1, 1), "huber").item() for d in (0.05, 0.1, 0.3, -1.0)]
    assert losses == pytest.approx([0.00125, 0.005, 0.025, 0.095])


def test_unknown_modes_and_shapes_that_would_broadcast_are_errors() -> None:
    with pytest.raises(ValueError, match="mode must be one of cosine, mse, huber"):
        feature_loss(drawn(1, 2), drawn(1, 2), "l1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must have the same shape \(got \(2, 4\) and \(4,\)\)"):
        feature_loss(drawn(2, 4), drawn(4))
    with pytest.raises(ValueError, match=r"present must be bool \(2,\)"):
        TeacherRows(drawn(2, 4), torch.ones(2))


def test_float16_features_are_compared_in_float32() -> None:
    big = torch.full((1, 1280), 300.0)  # whose squares are no float16
    assert feature_loss(big.half(), (2 * big).half(), "mse").item() == 90_000
    assert feature_loss(big.half(), (2 * big).half()).item() == pytest.approx(0, abs=1e-6)


def test_the_loss_of_sol_is_that_of_its_statistics_and_that_of_its_maps() -> None:
    stats, maps = drawn(3, 4), drawn(3, 8, 8)
    present = torch.tensor([True, True, False])
    loss = sol_loss(stats + 1, maps + 2, TeacherRows(stats, present), TeacherRows(maps, present))
    assert loss.item() == pytest.approx(1 + 4, rel=1e-5)


def test_spatial_weights_have_mean_one_and_go_straight_from_cell_to_cell() -> None:
    maps = drawn(2, 8, 8).exp()
    weights = spatial_weights(maps)
    assert weights.shape == (2, 64, 64)
    assert torch.allclose(weights.mean(dim=(1, 2)), torch.ones(2))
    assert torch.allclose(spatial_weights(1000 * maps), weights)
    # A slope from 1 to 8 stays a slope between the middles of the outermost cells, and is level beyond them.
    slope = spatial_weights(torch.arange(1.0, 9.0).expand(1, 8, 8))[0, 20]
    expected = ((torch.arange(64) + 0.5) / 8 + 0.5).clamp(1, 8) / 4.5
    assert torch.allclose(slope, expected)
    assert torch.equal(spatial_weights(torch.ones(1, 8, 8)), torch.ones(1, 64, 64))


def test_a_row_without_a_map_weighs_its_places_alike_and_padding_weighs_nothing() -> None:
    maps = TeacherRows(drawn(2, 8, 8).exp(), torch.tensor([True, True])).where(torch.tensor([True, False]))
    content = torch.ones(2, 64, 64)
    content[:, :16] = 0
    weights = loss_weights(maps, content)
    assert weights is not None
    assert torch.allclose(weights.mean(dim=(1, 2)), torch.ones(2))
    assert (weights[:, :16] == 0).all()
    assert torch.allclose(weights[1, 16:], torch.tensor(64 / 48))
    assert weights[0, 16:].std() > 0.1
    assert loss_weights() is None


def test_weights_of_teachers_warm_up() -> None:
    assert [Warmup(0.1, 1000)(step) for step in (0, 250, 1000, 9000)] == pytest.approx([0, 0.025, 0.1, 0.1])
    assert [Warmup(0.05, 2000)(step) for step in (1000, 2000)] == pytest.approx([0.025, 0.05])
    assert Warmup(0.3, 0)(0) == 0.3
    with pytest.raises(ValueError, match=r"steps must be a whole number of at least 0 \(got -1\)"):
        Warmup(1.0, -1)


def document_maps(times: torch.Tensor) -> torch.Tensor:
    """The TinyFlux document's own maps, whose corners are negative at early times."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij")
    maps = 1 - torch.sqrt(x**2 + y**2) * (1 - times).view(-1, 1, 1)
    return maps / maps.sum(dim=(-2, -1), keepdim=True)


def test_loss_weights_of_negative_maps_are_those_of_the_maps_clamped_at_zero() -> None:
    maps = document_maps(torch.tensor([0.05, 0.15, 0.25, 0.35]))
    assert maps.min() < 0
    weights, clamped = (
        loss_weights(TeacherRows(each, torch.ones(4, dtype=torch.bool))) for each in (maps, maps.clamp(min=0))
    )
    assert weights.min() >= 0
    torch.testing.assert_close(weights, clamped)
    torch.testing.assert_close(weights.mean(dim=(-2, -1)), torch.ones(4))
    without_positive_values = torch.stack([torch.zeros(8, 8), torch.full((8, 8), -1.0)])
    torch.testing.assert_close(spatial_weights(without_positive_values), torch.ones(2, 64, 64))
    with pytest.raises(ValueError, match="content must be at least 0"):
        loss_weights(content=torch.full((1, 64, 64), -0.5))
