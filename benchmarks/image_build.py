"""Building a cache of images against Pillow alone: decode and resize, nothing kept."""

import io
import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from PIL import Image

import forebay as fb
from benchmarks.image_data import RECIPE, SIZE, Images
from benchmarks.measure import Comparison
from benchmarks.tokens_goal import Goal

BARE_IMAGES = 1000


def measure_build(images: Images, rounds: int) -> None:
    """The bare loop, alone and twice at once, one worker, two workers, in turn; the best of each counts.

    One worker may use two cores, since it writes a chunk while it computes the next; so it is also timed on one.
    """
    seconds: dict[str, list[float]] = {"bare": [], "both": [], "one": [], "two": [], "core": []}
    bare_paths = sorted(images.files().iterdir())[:BARE_IMAGES]
    for _ in range(rounds):
        seconds["bare"].append(timed_bare(bare_paths) / len(bare_paths))
        with ProcessPoolExecutor(2, get_context("spawn")) as pool:
            list(pool.map(timed_bare, [bare_paths[:9]] * 2))  # both have started
            seconds["both"].append(max(pool.map(timed_bare, [bare_paths] * 2)) / len(bare_paths) / 2)
        for name, workers in (("one", 1), ("two", 2)):
            seconds[name].append(_timed_build(images, workers) / images.count)
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        seconds["core"].append(_timed_build(images, 1) / images.count)
        os.sched_setaffinity(0, cores)
    bare, both, one, two, core = (min(each) for each in seconds.values())
    print(Comparison("build, one worker / bare Pillow decode + resize", one, bare, 1, "images", 0.85))
    print(Comparison("build, two workers / one worker", two, one, 1, "images", 1.7))
    print(Comparison("build, two workers / one worker that has one core", two, core, 1, "images", 1.7))
    print(Comparison("bare Pillow, two processes / one, the ceiling", both, bare, 1, "images", 1.7), flush=True)


def measure_bytes(images: Images) -> None:
    """What is stored for an image, against normalised float32 canvases."""
    layer = fb.summarize(images.cache()).layers[0]
    share = layer.bytes / layer.rows / (4 * 3 * SIZE * SIZE)
    note = f"{layer.bytes / layer.rows / 1000:,.0f} of {4 * 3 * SIZE * SIZE / 1000:,.0f} kB"
    print(Goal("bytes per image / float32 canvas", share, "≤", 0.2, digits=3, note=note), flush=True)


def timed_bare(paths: list[Path]) -> float:
    started = time.perf_counter()
    for path in paths:
        image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
        scale = min(1.0, SIZE / max(image.size))
        width, height = (max(1, round(side * scale)) for side in image.size)
        image.resize((width, height), Image.Resampling.BILINEAR)
    return time.perf_counter() - started


def _timed_build(images: Images, workers: int) -> float:
    root = images.folder / f"built-by-{workers}"
    shutil.rmtree(root, ignore_errors=True)
    source = images.source()
    started = time.perf_counter()
    fb.build(root, source, RECIPE, workers=workers)
    spent = time.perf_counter() - started
    shutil.rmtree(root)
    return spent
