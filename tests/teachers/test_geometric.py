"""Sol in closed form: the figures of its document, put right."""

from pathlib import Path

import numpy as np
from tests.helpers.cache_files import layer_path

import forebay as fb
from forebay.teachers import BUCKETS, GeometricSol, TeacherRecipe, features, geometric_spatial, geometric_stats


def test_its_numbers_are_those_of_the_formulas() -> None:
    stats = geometric_stats(BUCKETS)
    t = np.array(BUCKETS)
    assert stats.shape == (10, 4)
    assert np.allclose(stats[:, 0], 1 - t)
    assert np.allclose(stats[:, 1], t)
    assert np.allclose(stats[:, 3], 1 - t)
    assert np.isclose(stats[:, 2].min(), 0.365)
    assert np.isclose(stats[:, 2].max(), 0.485)


def test_its_maps_are_never_negative_and_sum_to_one() -> None:
    maps = geometric_spatial(BUCKETS)
    assert maps.shape == (10, 8, 8)
    assert maps.min() == 0
    assert np.allclose(maps.sum(axis=(1, 2)), 1, atol=1e-6)
    assert np.allclose(maps, maps[:, ::-1, ::-1])
    assert (maps[:, 3, 3] >= maps.reshape(10, -1).max(axis=1) - 1e-7).all()


def test_the_clamp_touches_as_many_cells_as_the_plain_formula_has_below_zero() -> None:
    line = np.linspace(-1, 1, 8)
    plain = [1 - np.hypot(line[:, None], line[None, :]) * (1 - t) for t in BUCKETS]
    below = [int((map_ < 0).sum()) for map_ in plain]
    assert below[:4] == [20, 12, 4, 0]
    assert [int((map_ == 0).sum()) for map_ in geometric_spatial(BUCKETS)][:4] == [20, 12, 4, 0]


def test_it_is_stored_once_and_read_for_every_row(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("".join(f"prompt {number}\n" for number in range(30)))
    fb.build(tmp_path / "c", fb.sources.lines(tmp_path / "p.txt"), fb.RawRecipe(chunk_bytes=64), workers=0)
    report = fb.build(tmp_path / "c", None, TeacherRecipe(teacher=GeometricSol()))
    assert report.layer == "sol"
    cache = fb.open_cache(tmp_path / "c")
    assert cache.recipe("sol").columns == ()
    found = features(cache, "sol").at([0, 29, 7], [0.42, 0.0, 0.15])
    assert found["sol.present"].tolist() == [True, True, True]
    assert np.allclose(found["sol_stats"][0], [0.58, 0.42, 0.476, 0.58], atol=1e-6)
    assert np.array_equal(found["sol_stats"][1:], geometric_stats([0.05, 0.15]))
    assert np.allclose(found["sol_spatial"].sum(axis=(1, 2)), 1, atol=1e-6)
    stored = sum(path.stat().st_size for path in (layer_path(tmp_path / "c", "sol")).glob("constants*"))
    assert stored < 12_000
