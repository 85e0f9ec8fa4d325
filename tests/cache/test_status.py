"""Status and gaps: what is there, what is missing, who works on it, what failed, what is stale."""

import shutil
from pathlib import Path

import msgspec
import pytest
from tests.helpers.cache_files import chunk_path, layer_path
from tests.helpers.layer_recipes import (
    LineRecipe,
    flip,
    layered_cache,
    number_cache,
    write_lines,
)

import forebay as fb
from forebay.cache.claims import Claim
from forebay.cache.reports import FailedSample
from forebay.errors import CacheNotFound, IndexCorrupt


def put_claim(root: Path, name: str, owner: object, **facts: object) -> Path:
    path = root / "claims" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(Claim(owner=str(owner), host="elsewhere", pid=4711, **facts)))  # type: ignore[arg-type]
    return path


def test_a_complete_cache_is_complete(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    status = fb.status(root)
    assert (status.root, status.generation, status.complete, status.source_checked) == (str(root), 1, True, True)
    assert (status.claims, status.stale, status.grown) == ((), {}, ())
    numbers, length = status.layers
    assert (numbers.layer, numbers.planned, numbers.present, numbers.listed) == ("numbers", 5, 5, 5)
    assert (numbers.missing, numbers.suspect, numbers.rows, numbers.samples) == ((), (), 20, 20)
    assert (length.failures, length.reasons) == (5, {"three": 5})


def test_chunks_of_another_size_or_head_are_suspect(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    flip(chunk_path(root, "numbers", 1), 100)
    path = chunk_path(root, "numbers", 3)
    path.write_bytes(path.read_bytes() + b" ")
    (status,) = fb.status(root).layers
    assert status.suspect == (1, 3)


def test_failed_samples_are_shown_with_reason_and_counted(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_bytes(b"000001\n------\n000002\n" * 30)
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0, max_failures=1.0)
    status = fb.status(root)
    assert status.layers[0].reasons == {"no-number": 30}
    assert (status.layers[0].failures, status.layers[0].samples, status.layers[0].rows) == (30, 90, 60)
    assert (len(status.failed_samples), status.failed_samples_left_out) == (20, 10)
    assert status.failed_samples[0] == FailedSample(
        layer="numbers", chunk=0, sample="a.txt@7", reason="no-number", detail="not a number"
    )
    for asked, listed in ((0, 0), (7, 7), (30, 30), (99, 30), (None, 30)):
        status = fb.status(root, failures=asked)
        assert (len(status.failed_samples), status.failed_samples_left_out) == (listed, 30 - listed)


def test_a_damaged_list_of_failures_is_not_shown_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_bytes(b"000001\n------\n")
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0)
    path = chunk_path(root, "numbers", 0)
    size = path.stat().st_size
    for position in (size - 1, size - 10, size - 30):
        flip(path, position)
        status = fb.status(root)
        assert status.failed_samples == ()
        assert status.layers[0].failures == 1
        flip(path, position)
    assert len(fb.status(root).failed_samples) == 1


def test_stale_and_grown_sources_are_named(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (tmp_path / "raw/a.txt").write_bytes(b"999999\n" * 10)
    with open(tmp_path / "raw/b.txt", "ab") as file:
        file.write(b"000020\n")
    status = fb.status(root)
    assert status.stale == {"a.txt": "has other content than was planned"}
    assert (status.grown, status.source_root) == (("b.txt",), str(tmp_path / "raw"))
    assert status.complete, "all that was planned is there"


def test_a_cache_without_a_generation_has_a_status(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (root / "generations/000000.safetensors").unlink()
    status = fb.status(root)
    assert (status.generation, status.complete) == (None, False)
    assert (status.layers[0].present, status.layers[0].listed) == (5, 0)


def test_no_cache_and_a_damaged_one_are_said(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound):
        fb.status(tmp_path / "nowhere")
    root = number_cache(tmp_path)
    flip(root / "plan/000000.safetensors", 4300)
    with pytest.raises(IndexCorrupt, match=r"plan/000000.safetensors"):
        fb.status(root)


def test_a_lost_plan_is_named_and_does_not_pass_for_no_plan(tmp_path):
    root = layered_cache(tmp_path)
    (root / "plan/000000.safetensors").unlink()
    with pytest.raises(IndexCorrupt, match=r"(?s)'plan/000000.safetensors' .* it is gone"):
        fb.status(root)


def test_a_published_layer_whose_folder_is_gone_is_missing_and_not_forgotten(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    shutil.rmtree(layer_path(root, "length"))
    status = fb.status(root)
    assert not status.complete
    assert {layer.layer: len(layer.lost) for layer in status.layers} == {"length": 5, "numbers": 0}


def test_chunks_are_missing_lost_or_unlisted(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 20)
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0, start_chunk=1, end_chunk=3)
    chunk_path(root, "numbers", 4).write_bytes(b"left by somebody")
    chunk_path(root, "numbers", 2).unlink()
    status = fb.status(root)
    (layer,) = status.layers
    assert not status.complete
    assert (layer.planned, layer.missing, layer.lost, layer.unlisted) == (5, (0,), (2,), (4,))
