"""Features at any moment: the two buckets around it, weighed; exact at nodes, whatever they are stored in."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.cache_files import chunk_path
from tests.helpers.layer_recipes import flip
from tests.teachers.own_teachers import SENTENCES, Letters, Ramp, prompt_cache, ramp

import forebay as fb
from forebay.errors import ChunkCorrupt, NotFound
from forebay.teachers import BUCKETS, TeacherRecipe, features

LETTERS = [len(sentence) for sentence in SENTENCES]
UNEVEN = (0.0, 0.05, 0.3, 0.31, 1.0)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ramps in three types and on two grids; every row but those without a prompt."""
    root = prompt_cache(tmp_path_factory.mktemp("features"), chunk_bytes=120)
    for stored in ("float16", "bfloat16", "float32"):
        own = TeacherRecipe(teacher=Ramp(name=f"ramp_{stored}"), stored=stored)
        fb.build(root, None, own)
    fb.build(root, None, TeacherRecipe(teacher=Ramp(name="uneven"), buckets=UNEVEN, stored="float32"))
    fb.build(root, None, TeacherRecipe(teacher=Ramp(name="single"), buckets=(0.5,), stored="float32"))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("moments", [np.float16, np.float32, np.float64])
def test_every_node_is_exact(taught: Path, stored: str, moments: type) -> None:
    cache = fb.open_cache(taught)
    rows = np.repeat(np.arange(10), 10)
    t = np.tile(np.array(BUCKETS, moments), 10)
    found = features(cache, f"ramp_{stored}").at(rows, t)
    whole = cache.read(range(10), [f"ramp_{stored}"])[f"ramp_{stored}"].astype(np.float32)
    assert found[f"ramp_{stored}"].dtype == np.float32
    assert np.array_equal(found[f"ramp_{stored}"].reshape(10, 10, -1), whole)


@pytest.mark.parametrize(("layer", "low", "high"), [("ramp_float32", 0.05, 0.95), ("uneven", 0.0, 1.0)])
def test_between_and_outside_the_nodes(taught: Path, layer: str, low: float, high: float) -> None:
    rows = np.array([9, 0, 4, 4, 7, 2, 1, 3])
    t = np.array([0.42, 0.04, 0.0, 1.0, 0.96, 0.305, 0.0501, 0.7])
    found = features(fb.open_cache(taught), layer).at(rows, t)
    expected = ramp(np.array(LETTERS)[rows], np.clip(t, low, high))
    assert np.allclose(found[layer], expected, atol=1e-5)
    assert found[f"{layer}.present"].all()


def test_one_moment_stands_for_all_rows_and_one_bucket_for_all_moments(taught: Path) -> None:
    cache = fb.open_cache(taught)
    assert np.allclose(features(cache, "uneven").at([1, 2], 0.4)["uneven"], ramp([8, 7], np.array([0.4, 0.4])))
    single = features(cache, "single")
    assert np.allclose(single.at([1, 2], [0.0, 0.9])["single"], ramp([8, 7], np.array([0.5, 0.5])))
    assert single.between([1, 2], 0.3).values["single"].shape == (2, 1, 6)
    with pytest.raises(ValueError, match="t must be one number or one per row: 2"):
        single.at([1, 2], [0.1, 0.2, 0.3])


def test_no_rows_are_no_features(taught: Path) -> None:
    found = features(fb.open_cache(taught), "uneven").at(np.empty(0, np.int64), np.empty(0))
    assert found["uneven"].shape == (0, 6)


def test_a_block_is_checked_whole_when_it_is_first_touched_and_not_read_again(taught: Path, tmp_path: Path) -> None:
    shutil.copytree(taught, tmp_path / "cache")
    path = chunk_path(tmp_path / "cache", "uneven", 0)
    row, bucket = 0, 4
    place = _place_of(tmp_path / "cache", row, bucket)
    flip(path, place)
    with pytest.raises(ChunkCorrupt, match="column 'uneven'"):
        features(fb.open_cache(tmp_path / "cache"), "uneven").at([row], 0.1)
    flip(path, place)
    found = features(fb.open_cache(tmp_path / "cache"), "uneven")
    before = found.at([row], 0.1)["uneven"]
    flip(path, place)
    assert np.array_equal(found.at([row], 0.1)["uneven"], before)  # the harmed bucket is none of the two
    assert not np.array_equal(found.at([row], 1.0)["uneven"], ramp([7], np.array([1.0])))


def _place_of(root: Path, row: int, bucket: int) -> int:
    """Where a bucket of a row of chunk 0 begins in the file."""
    value = next(fb.open_cache(root).chunks(["uneven"]))["uneven"]
    content = (chunk_path(root, "uneven", 0)).read_bytes()
    return content.index(value.tobytes()) + (row * value.shape[1] + bucket) * value[0, 0].nbytes


def test_a_layer_that_is_not_timed_says_so(tmp_path: Path) -> None:
    root = prompt_cache(tmp_path)
    fb.build(root, None, TeacherRecipe(teacher=Letters()), end_chunk=0)
    cache = fb.open_cache(root)
    with pytest.raises(NotFound, match=r"'letters' of .* holds no features at timesteps"):
        features(cache, "letters")
    with pytest.raises(NotFound, match=r"(?s)has no column 'words'.*letters"):
        cache.read([0], ["words"])
    with pytest.raises(NotFound):
        cache.read([9], ["letters"])["letters"]
