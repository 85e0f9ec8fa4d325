"""The folder of images and prompts beside a cache: only names that forebay made are removed or written."""

import json
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import forebay as fb
from forebay.compat.prompt_caches import PromptCaches
from forebay.teachers.protocol import file_hash


def pictures(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), (number, 0, 0)) for number in range(count)]


def test_files_of_others_stay_and_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    caches = PromptCaches(str(tmp_path / "caches"), 4)
    prompts = ["a", "b"]
    samples = Path(f"{caches._root(prompts)}.samples")
    samples.mkdir(parents=True)
    (samples / "notes.txt").write_text("mine")
    (samples / "00000007.png").write_bytes(b"left by a longer list")
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    (samples / "00000000.json").symlink_to(canary)
    caches._keep(caches._root(prompts), pictures(2), prompts)
    assert (samples / "notes.txt").read_text() == "mine"
    assert canary.read_text() == "untouched"
    kept = {"00000000.json", "00000000.png", "00000001.json", "00000001.png", "notes.txt"}
    assert {path.name for path in samples.iterdir()} == kept
    assert not (samples / "00000000.json").is_symlink()


def test_a_file_changed_in_place_is_hashed_again_though_its_time_was_put_back(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"before")
    first, status = file_hash(str(weights)), weights.stat()
    weights.write_bytes(b"after!")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert weights.stat().st_mtime_ns == status.st_mtime_ns
    assert file_hash(str(weights)) != first


def noisy(mode: str, size: tuple[int, int], seed: int) -> Image.Image:
    bands = 4 if mode == "CMYK" else 3
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], bands), np.uint8)
    return Image.frombytes(mode, size, pixels.tobytes())


def test_images_of_pillow_keep_orientation_and_mode(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[274] = 6  # a quarter turn
    noisy("RGB", (20, 12), 0).save(tmp_path / "turned.png", exif=turned)
    noisy("CMYK", (9, 14), 1).save(tmp_path / "printed.tif")
    noisy("CMYK", (16, 16), 2).save(tmp_path / "press.jpg", exif=turned)
    paths = [tmp_path / name for name in ("turned.png", "printed.tif", "press.jpg")]
    prompts = [path.stem for path in paths]
    read = []
    with ExitStack() as opened:
        by_pillow = [opened.enter_context(Image.open(path)) for path in paths]
        for folder, images in {"paths": paths, "pillow": by_pillow}.items():
            root = PromptCaches(str(tmp_path / folder), 4).root_of_images(images, prompts, 16)
            read.append(fb.open_cache(root).read(range(3), ["box", "pixels", "metadata"]))
    for row, path in enumerate(paths):
        assert read[0]["box"][row].tolist() == read[1]["box"][row].tolist()
        assert np.array_equal(read[0]["pixels"][row], read[1]["pixels"][row]), path.name
        for one in read:
            assert json.loads(one["metadata"][row].tobytes()) == {"caption": path.stem}
    assert read[1]["box"][0].tolist() == [3, 0, 10, 16], "12 × 20, as it is displayed"


def test_a_mode_that_no_file_keeps_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an image of mode 'HSV' cannot be kept; convert it to RGB first"):
        PromptCaches(str(tmp_path), 4).root_of_images([Image.new("HSV", (4, 4))], ["a"], 16)
