"""Photographs to image rows: `fb.build` next to Pillow's decode and resize alone."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

import forebay as fb
from benchmarks.lib.image_data import RECIPE, SIZE, Images
from benchmarks.lib.options import Options
from benchmarks.lib.result import Result, compared
from benchmarks.lib.timing import in_turn, rate_of

CASE = "build.images"


def measure(options: Options) -> Iterator[Result]:
    images = Images.of(options)
    paths, root = sorted(images.files().iterdir()), options.folder / "built-images"

    def build(workers: int) -> float:
        shutil.rmtree(root, ignore_errors=True)
        return rate_of(lambda: fb.build(root, images.source(), RECIPE, workers=workers, progress=False), images.count)

    works = {
        "bare": lambda: rate_of(lambda: decode_and_resize(paths[: images.count // 4]), images.count // 4),
        "one": lambda: build(1),
        "two": lambda: build(2),
    }
    rates = in_turn(works, options.rounds)
    shutil.rmtree(root, ignore_errors=True)
    what = f"{images.count:,} photographs at {SIZE} x {SIZE}"
    yield compared(
        CASE, f"build, one worker, {what}", "Pillow decode + resize, one process", rates["one"], rates["bare"],
        unit="images/s", equal="not compared: the peer keeps nothing", at_least=0.85,
    )  # fmt: skip
    yield compared(
        CASE, f"build, two workers, {what}", "build, one worker", rates["two"], rates["one"], unit="images/s",
        equal="same chunk bytes",
    )  # fmt: skip
    layer = fb.info(images.cache()).layers[0]
    float_kb = 4 * 3 * SIZE * SIZE / 1000
    yield Result(
        case=CASE, work=f"stored bytes of an image (float32 canvas: {float_kb:,.0f} kB)", unit="kB",
        ours=layer.bytes / layer.rows / 1000, at_most=0.2 * float_kb,
    )  # fmt: skip


def decode_and_resize(paths: list[Path]) -> None:
    for path in paths:
        image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
        scale = min(1.0, SIZE / max(image.size))
        width, height = (max(1, round(side * scale)) for side in image.size)
        image.resize((width, height), Image.Resampling.BILINEAR)
