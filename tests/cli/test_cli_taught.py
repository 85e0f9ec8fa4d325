"""`forebay import` of an old teacher cache, and `forebay peek --png` of what teachers said."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.cli.running import run

import forebay as fb
from forebay.preview.feature_pictures import (
    BRIGHT,
    DARK,
    LINE_COLORS,
    TITLE,
    WIDTH,
    FeaturePlot,
    heat_colors,
    signed_colors,
    teacher_picture,
)
from forebay.teachers import GeometricSol, TeacherRecipe

BUCKETS = torch.linspace(0.05, 0.95, 10)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An old cache of four rows, of one of which Lune had said nothing."""
    folder = tmp_path_factory.mktemp("old")
    features = torch.randn(4, 10, 32, generator=torch.Generator().manual_seed(0)).half()
    features[2] = 0
    maps = torch.rand(4, 10, 8, 8, generator=torch.Generator().manual_seed(1))
    sol = {"stats": torch.rand(4, 10, 4), "spatial": maps / maps.sum((2, 3), keepdim=True), "t_buckets": BUCKETS}
    torch.save({"name": "old", "lune": {"features": features, "t_buckets": BUCKETS}, "sol": sol}, folder / "cache.pt")
    return folder / "cache.pt"


@pytest.fixture(scope="module")
def cache(old: Path) -> str:
    into = str(old.parent / "imported")
    run("import", str(old), "--into", into)
    return into


def test_an_old_cache_is_imported_and_what_is_absent_is_told(old: Path, tmp_path: Path) -> None:
    report = run("import", old, "--into", tmp_path / "cache", "--json").json
    assert report["rows"] == 4
    assert {layer: built["failures"] for layer, built in report["layers"].items()} == {"lune": 1, "sol": 0}
    again = run("import", str(old), "--into", str(tmp_path / "cache"))
    assert "0 chunks built, 1 already present" in again.out
    run("verify", str(tmp_path / "cache"))


def test_what_is_no_old_cache_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache.pt").write_bytes(b"nothing")
    failed = run("import", tmp_path / "cache.pt", "--into", tmp_path / "cache", code=1)
    assert "cannot be imported as a teacher cache" in failed.err
    assert "there is no such file" in run("import", "gone.pt", "--into", tmp_path / "cache", code=1).err
    assert (
        "it is a file; --into needs a folder"
        in run("import", tmp_path / "cache.pt", "--into", tmp_path / "cache.pt", code=1).err
    )


def test_teachers_are_drawn_over_timesteps(cache: str, tmp_path: Path) -> None:
    path = tmp_path / "taught.png"
    said = run("peek", cache, "--row", "1", "--row", "2", "--layer", "lune", "--layer", "sol", "--png", str(path))
    assert "absent      lune 2\n" in said.out
    with Image.open(path) as picture:
        assert picture.width == WIDTH
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert (pixels == BRIGHT).all(axis=1).any()  # the brightest cell of Sol's maps
    title = colours_of(path, slice(0, TITLE))  # of the first part: Lune has no names, Sol's statistics have four
    assert not title & set(LINE_COLORS)
    run("peek", cache, "--row", "1", "--layer", "sol", "--png", str(path))
    assert colours_of(path, slice(0, TITLE)) >= set(LINE_COLORS[:4])
    record = run("peek", cache, "--row", "2", "--png", path, "--json").json
    assert record["layers"] == ["lune", "sol"]
    assert record["absent"] == {"lune": [2], "sol": []}


def colours_of(path: Path, lines: slice) -> set[tuple[int, ...]]:
    with Image.open(path) as picture:
        return {tuple(pixel) for pixel in np.asarray(picture.convert("RGB"))[lines].reshape(-1, 3).tolist()}


def test_sol_in_closed_form_is_drawn_too(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("a cat\na dog\n")
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "prompts"), fb.RawRecipe(), workers=0)
    fb.build(tmp_path / "cache", None, TeacherRecipe(teacher=GeometricSol()))
    path = tmp_path / "sol.png"
    run("peek", str(tmp_path / "cache"), "--rows", "1", "--png", str(path))
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    first = pixels[20:90, 6:80].reshape(-1, 3)  # the map at t = 0.05: dark corners, a bright middle
    assert (first == DARK).all(axis=1).any()
    assert (first == BRIGHT).all(axis=1).any()


def test_options_that_draw_nothing_are_wrong_usage(cache: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("a\n")
    fb.build(tmp_path / "raw", fb.sources.lines(tmp_path / "lines"), fb.RawRecipe(), workers=0)
    assert "--layer needs --png FILE" in run("peek", cache, "--layer", "lune", code=2).err
    assert "--png draws images and teacher layers" in run("peek", tmp_path / "raw", "--png", "x.png", code=2).err
    assert "--patch images" in run("peek", cache, "--patch", "8", "--png", "x.png", code=2).err
    assert "no layer 'sun'" in run("peek", cache, "--layer", "sun", "--png", "x.png", code=1).err


def test_colors_are_true_to_values() -> None:
    assert heat_colors(np.array([0.0, 1.0], np.float32), 1.0).tolist() == [list(DARK), list(BRIGHT)]
    blue, white, red = signed_colors(np.array([[-2.0, 0.0, 2.0]], np.float32))[0].astype(int)
    assert blue[2] > blue[0]
    assert red[0] > red[2]
    assert white.min() > 240
    picture = teacher_picture(
        [FeaturePlot("nothing", None, np.array([0.5])), FeaturePlot("flat", np.zeros((1, 20)), np.array([0.5]))]
    )
    assert picture.pixels.shape[1] == WIDTH
