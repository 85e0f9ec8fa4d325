"""A folder of everything that readers of images stumble over: each file is the right picture or a recorded failure."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cli.running import run
from tests.helpers.bad_images import (
    MAX_PIXELS,
    PAD,
    SIZE,
    Expected,
    Fails,
    Shows,
    encoded,
    manifest_lines,
    picture,
    write_folder,
)

import forebay as fb
from forebay.torch import ImageBatch

RECIPE = fb.ImageRecipe(size=SIZE, max_pixels=MAX_PIXELS, chunk_bytes=1 << 16)

Made = tuple[Path, Path, Mapping[str, Expected]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder, the cache that two processes made of it, and what is expected of every file."""
    folder, root = tmp_path_factory.mktemp("bad") / "images", tmp_path_factory.mktemp("made") / "cache"
    folder.mkdir()
    expected = write_folder(folder)
    fb.build(root, fb.sources.images(folder), RECIPE, workers=2, max_failures=1.0)
    return folder, root, expected


def rows_by_id(root: Path) -> dict[str, dict[str, np.ndarray]]:
    return {os.fsdecode(row["id"].tobytes()): row for row in fb.open_cache(root)}


def failures_by_id(root: Path) -> dict[str, str]:
    return {failed.sample: failed.reason for failed in fb.status(root, failures=None).failed_samples}


def box_of(shows: Shows) -> tuple[int, int, int, int]:
    height, width = shows.content.shape[:2]
    return (SIZE - width) // 2, (SIZE - height) // 2, width, height


def whole_canvas(shows: Shows) -> tuple[np.ndarray, np.ndarray]:
    """The canvas that a model should get, and where it is padding."""
    left, top, width, height = box_of(shows)
    canvas, padded = np.full((SIZE, SIZE, 3), PAD, np.uint8), np.ones((SIZE, SIZE), np.bool_)
    canvas[top : top + height, left : left + width] = shows.content
    padded[top : top + height, left : left + width] = False
    return canvas, padded


def test_every_file_is_a_row_or_a_failure_with_its_reason(made: Made):
    _, root, expected = made
    assert failures_by_id(root) == {name: what.reason for name, what in expected.items() if isinstance(what, Fails)}
    assert set(rows_by_id(root)) == {name for name, what in expected.items() if isinstance(what, Shows)}
    assert fb.verify(root).sound


def test_the_guide_explains_every_reason(made: Made):
    guide = (Path(__file__).parents[2] / "docs" / "guide-images.md").read_text()
    assert not {reason for reason in failures_by_id(made[1]).values() if f"`{reason}`" not in guide}


def test_every_row_is_the_right_picture_in_the_right_place(made: Made):
    _, root, expected = made
    for name, row in rows_by_id(root).items():
        shows = expected[name]
        assert isinstance(shows, Shows)
        assert tuple(row["original_size"]) == shows.size, name
        assert tuple(row["box"]) == box_of(shows), name
        content = row["pixels"].reshape(3, *shows.content.shape[:2]).transpose(1, 2, 0)
        assert np.abs(content.astype(int) - shows.content).max() <= shows.tolerance, name


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_no_mask_is_wrong(made: Made, flip: float):
    _, root, expected = made
    rows = rows_by_id(root)
    batch = ImageBatch(fb.open_cache(root), flip=flip, masks="host")(list(rows.values()))
    for name, pixels, padded in zip(rows, batch["pixels"], batch["pixel_mask"], strict=True):
        shows = expected[name]
        assert isinstance(shows, Shows)
        canvas, padding = whole_canvas(shows)
        if flip:
            canvas, padding = canvas[:, ::-1], padding[:, ::-1]
        assert torch.equal(padded, torch.from_numpy(padding.copy())), name
        assert np.abs(pixels.permute(1, 2, 0).numpy().astype(int) - canvas).max() <= shows.tolerance, name


def test_what_was_said_beside_a_picture_is_kept(made: Made):
    cache = fb.open_cache(made[1])
    tags = cache.recipe("images").fields["tags"]
    rows = rows_by_id(made[1])

    def tags_of(name: str) -> set[str]:
        return {tags[index] for index in rows[f"said/{name}.png"]["tags"]}

    assert tags_of("good") == {"cat", "looking_left"}
    assert tags_of("listed") == {"cat", "looking_right", "dog"}
    assert tags_of("marked") == {"Käse", "猫"}
    assert tags_of("empty-object") == set()


def test_one_process_makes_the_same_bytes(made: Made, tmp_path: Path):
    folder, root, _ = made
    fb.build(tmp_path / "cache", fb.sources.images(folder), RECIPE, workers=0, max_failures=1.0)
    chunks = sorted(path.name for path in (root / "layers").glob("images.*/*.safetensors"))
    assert len(chunks) > 1
    for name in chunks:
        one, two = (next((at / "layers").glob(f"images.*/{name}")) for at in (root, tmp_path / "cache"))
        assert one.read_bytes() == two.read_bytes(), name


def test_a_row_cache_gives_the_same_rows_and_leaves_out_the_same_files(made: Made, tmp_path: Path):
    folder, root, _ = made
    rows = rows_by_id(root)
    with fb.CachedImages(fb.sources.images(folder), RECIPE, l1=0, l2=tmp_path / "rows", unreadable="skip") as images:
        for _ in range(2):  # decoded and written back, then found on disk
            found = {os.fsdecode(row["id"].tobytes()): row for row in images.read(range(len(images)))}
            assert set(found) == set(rows)
            for name, row in rows.items():
                assert all(np.array_equal(found[name][column], row[column]) for column in row), name
            images.flush()
        assert images.statistics().l2_hits == len(rows)


@pytest.mark.slow
def test_every_verb_can_say_every_name(made: Made, tmp_path: Path):
    _, root, expected = made
    failed = sum(isinstance(what, Fails) for what in expected.values())
    assert len(run("status", root, "--failures", "all", "--json").json["failed_samples"]) == failed
    assert "\x1b" not in run("status", root, "--failures", "all").out
    assert "\x1b" not in run("peek", root, "--rows", 999).out
    assert len(run("peek", root, "--rows", 999, "--json").json["shown"]) == len(expected) - failed
    run("peek", root, "--rows", 999, "--png", tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 0


def test_the_bound_on_pixels_can_be_raised(made: Made):
    content = (made[0] / "bombs" / "just-too-large.png").read_bytes()
    row = fb.ImageRecipe(size=SIZE, max_pixels=MAX_PIXELS + 1000).make_row(fb.Sample("large", content))
    assert tuple(row["original_size"]) == (1001, 1000)
    assert (row["pixels"] == 77).all()


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """The paths that this process opens meanwhile."""
    opened: list[str] = []
    listening = True

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if listening and event == "open" and isinstance(arguments[0], str | bytes):
            opened.append(os.path.realpath(os.fsdecode(arguments[0])))

    sys.addaudithook(hear)
    try:
        yield opened
    finally:
        listening = False


def test_a_manifest_leads_nowhere_but_below_its_root(tmp_path: Path):
    folder, outside = tmp_path / "images", tmp_path / "outside.png"
    (folder / "formats").mkdir(parents=True)
    (folder / "formats" / "plain.png").write_bytes(encoded(picture(), "PNG"))
    outside.write_bytes(encoded(picture(), "PNG"))
    lines = manifest_lines("formats/plain.png", outside)
    manifest = folder / "all.jsonl"
    manifest.write_text("".join(f"{line}\n" for line in lines))
    with opened_files() as opened:
        fb.build(tmp_path / "cache", fb.sources.image_manifest(manifest), RECIPE, workers=0, max_failures=1.0)
    assert str(folder / "formats" / "plain.png") in opened
    assert str(outside) not in opened
    reasons = [failed.reason for failed in fb.status(tmp_path / "cache", failures=None).failed_samples]
    assert sorted(reasons) == sorted(what.reason for what in lines.values() if isinstance(what, Fails))
    assert len(fb.open_cache(tmp_path / "cache")) == len(lines) - len(reasons)


def test_a_file_that_vanishes_stops_its_chunk_and_no_other(made: Made, tmp_path: Path):
    folder, root = tmp_path / "images", tmp_path / "cache"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.png").write_bytes(encoded(picture(SIZE, SIZE), "PNG"))
    recipe = fb.ImageRecipe(size=SIZE, chunk_bytes=3 * SIZE * SIZE * 2)
    fb.build(root, fb.sources.images(folder), recipe, workers=0, end_chunk=0, max_failures=1.0)
    (folder / "7.png").rename(tmp_path / "away.png")
    with pytest.raises(fb.errors.ForebayError, match=r"7\.png"):
        fb.build(root, fb.sources.images(folder), recipe, workers=0)
    assert len(fb.open_cache(root)) >= 2
    (tmp_path / "away.png").rename(folder / "7.png")
    fb.build(root, fb.sources.images(folder), recipe, workers=0)
    assert len(fb.open_cache(root)) == 8
