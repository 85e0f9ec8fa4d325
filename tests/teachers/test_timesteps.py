"""Where a moment lies between buckets: exact at nodes in any type, linear between, clamped outside."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled

from forebay.errors import RecipeInvalid
from forebay.teachers import BUCKETS, GeometricSol, TeacherRecipe, neighbors

TYPES = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]


def at(values: np.ndarray, buckets: object, moments: object) -> np.ndarray:
    """The definition, in the arithmetic of features."""
    low, alpha = neighbors(buckets, moments)
    wide = values.astype(np.float32)
    return (1 - alpha) * wide[low] + alpha * wide[low + 1]


def test_the_usual_buckets_are_ten_from_005_to_095() -> None:
    assert np.allclose(BUCKETS, np.linspace(0.05, 0.95, 10), atol=1e-12)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("stored", [np.float16, np.float32])
def test_every_bucket_is_exact_at_its_node_in_every_type(dtype: type, stored: type) -> None:
    values = np.random.default_rng(0).normal(size=10).astype(stored)
    for nodes in (np.array(BUCKETS).astype(dtype), np.linspace(0.05, 0.95, 10).astype(dtype)):
        assert np.array_equal(at(values, BUCKETS, nodes), values.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_every_bucket_is_exact_at_the_node_that_torch_computes(dtype: torch.dtype) -> None:
    values = np.random.default_rng(1).normal(size=10).astype(np.float16)
    nodes = torch.linspace(0.05, 0.95, 10, dtype=dtype).numpy()
    assert np.array_equal(at(values, BUCKETS, nodes), values.astype(np.float32))


def test_042_lies_between_buckets_3_and_4_with_weight_07() -> None:
    for dtype in (np.float32, np.float64):
        low, alpha = neighbors(BUCKETS, np.array([0.42], dtype))
        assert low.tolist() == [3]
        assert abs(float(alpha[0]) - 0.7) < 1e-5


def test_moments_outside_of_the_buckets_are_the_ends() -> None:
    low, alpha = neighbors(BUCKETS, [0.0, 0.049, 0.951, 1.0])
    assert (low + alpha).tolist() == [0, 0, 9, 9]


def test_one_bucket_is_all_there_is() -> None:
    low, alpha = neighbors([0.5], [0.1, 0.5, 0.9])
    assert low.tolist() == [0, 0, 0]
    assert alpha.tolist() == [0, 0, 0]


def test_one_moment_is_as_good_as_a_list_of_one() -> None:
    low, alpha = neighbors(BUCKETS, 0.42)
    assert (low.shape, alpha.shape) == ((), ())
    assert int(low) == 3
    assert abs(float(alpha) - 0.7) < 1e-5


@pytest.mark.parametrize("grid", [BUCKETS, [0.5]])
def test_what_is_no_number_is_refused(grid: object) -> None:
    with pytest.raises(ValueError, match=r"t\[1\] is not a number"):
        neighbors(grid, [0.5, np.nan])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [200, 1000])
def test_the_nodes_of_a_fine_grid_are_exact_in_a_type_that_tells_them_apart(dtype: type, count: int) -> None:
    """bfloat16 has 256 numbers between 0.5 and 1: of 200 nodes some lie one step apart, of 1000 some are one number."""
    grid = np.linspace(0.05, 0.95, count)
    written = grid.astype(dtype)
    exact = np.ones(count, np.bool_) if len(set(written.tolist())) == count else written.astype(np.float64) == grid
    found = neighbors(grid, written)
    assert np.array_equal((found.low + found.alpha)[exact], np.flatnonzero(exact))


def test_half_is_half_on_a_grid_that_bfloat16_cannot_write() -> None:
    grid = np.arange(1001) / 1000
    low, alpha = neighbors(grid, np.array([0.5, 0.25, 0.125], ml_dtypes.bfloat16))
    assert (low + alpha).tolist() == [500, 250, 125]


grids = st.lists(st.integers(0, 10_000), min_size=2, max_size=20, unique=True).map(
    lambda marks: [mark / 10_000 for mark in sorted(marks)]
)


@settings(max_examples=scaled(40))
@given(grids, st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_between_the_nodes_of_any_grid_it_is_linear(grid: list[float], moments: list[float]) -> None:
    values = np.random.default_rng(len(grid)).normal(size=len(grid)).astype(np.float32)
    assert np.allclose(at(values, grid, np.array(moments)), np.interp(moments, grid, values), atol=1e-5)


@given(grids)
def test_the_nodes_of_any_grid_are_exact(grid: list[float]) -> None:
    values = np.random.default_rng(len(grid)).normal(size=len(grid)).astype(np.float32)
    assert np.array_equal(at(values, grid, np.array(grid)), values)
    assert np.array_equal(at(values, grid, np.array(grid, np.float32)), values)


@pytest.mark.parametrize("grid", [(), (0.5, 0.5), (0.6, 0.5), (-0.1, 0.5), (0.5, 1.1), (0.1, float("nan"))])
def test_what_is_no_grid_is_refused(grid: tuple[float, ...]) -> None:
    with pytest.raises(RecipeInvalid, match="buckets must be"):
        TeacherRecipe(teacher=GeometricSol(), buckets=grid)


def test_steps_of_a_scheduler_are_no_moments() -> None:
    assert neighbors(BUCKETS, [0, 1]).low.tolist() == [0, 8]
    for grid in (BUCKETS, (0.5,)):
        for steps in (
            [0, 2],
            [-1, 1],
            [0, 999],
            [1.0, 420.0],
            [0.5, 1.001],
            [0.5, 2.0],
            [-0.01],
            [0.5, np.inf],
            [-np.inf],
        ):
            with pytest.raises(ValueError, match=r"t must be from 0 to 1 .*; divide the steps of a scheduler"):
                neighbors(grid, np.array(steps))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_t_that_rounding_put_outside_counts_as_the_end(dtype: type) -> None:
    beyond = np.nextafter(np.array([0, 1], dtype), np.array([-1, 2], dtype))
    assert np.array_equal(neighbors(BUCKETS, beyond).low, [0, 8])
    with pytest.raises(ValueError, match="t must be from 0 to 1"):
        neighbors(BUCKETS, np.array([0.5, 1.02], dtype))
