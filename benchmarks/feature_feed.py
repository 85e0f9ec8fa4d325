"""Training with teacher features against training without: the features are read in the loader's threads.

    python -m benchmarks.feature_feed

A step multiplies matrices. `alone` repeats that step; `batches` takes a batch of latents before each; `features` one
that also has Lune features at drawn times and CLIP encodings of every row. They alternate, and the best of each counts.
Goal: a step with features takes at most 3 % longer than the step alone.
"""

import tempfile
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

import forebay as fb
from forebay.teachers import Batch, Loaded, Output, Teacher, TeacherRecipe
from forebay.torch import Loader
from forebay.torch.distill import LogitNormalTimes

ROWS, BATCH, STEPS, ROUNDS, SIDE = 2048, 32, 30, 4, 1024


class Timed(Teacher, frozen=True, kw_only=True, tag="bench-timed"):
    """Features of the shape of Lune's."""

    timed: ClassVar[bool] = True

    def layer_name(self) -> str:
        return "lune"

    def outputs(self) -> tuple[Output, ...]:
        return (Output("lune", (1280,)),)

    def load(self, device: str, dtype: str) -> Loaded:
        return lambda batch: {"lune": batch.noise((1280,))}


class Encoded(Teacher, frozen=True, kw_only=True, tag="bench-encoded"):
    """Encodings of the shape of CLIP's, stored once for equal prompts."""

    prompted: ClassVar[bool] = True
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "prompt"

    def layer_name(self) -> str:
        return "clip"

    def outputs(self) -> tuple[Output, ...]:
        return (Output("clip_pooled", (768,)),)

    def load(self, device: str, dtype: str) -> Loaded:
        def encode(batch: Batch) -> dict[str, np.ndarray]:
            return {"clip_pooled": np.stack([np.full(768, len(prompt), np.float32) for prompt in batch.prompts])}

        return encode


class Latent(Teacher, frozen=True, kw_only=True, tag="bench-latent"):
    """Latents of 4 × 64 × 64."""

    def layer_name(self) -> str:
        return "latents"

    def outputs(self) -> tuple[Output, ...]:
        return (Output("latents", (4, 64, 64)),)

    def load(self, device: str, dtype: str) -> Loaded:
        return lambda batch: {"latents": batch.noise((4, 64, 64))}


def build(folder: Path) -> fb.Cache:
    (folder / "prompts.txt").write_text("".join(f"prompt {number % 512}\n" for number in range(ROWS)))
    fb.build(folder / "cache", fb.sources.lines(folder / "prompts.txt"), fb.RawRecipe(chunk_bytes=4096), workers=0)
    for teacher in (Latent(), Encoded(), Timed()):
        fb.build(folder / "cache", None, TeacherRecipe(teacher=teacher, batch_size=64))
    return fb.open_cache(folder / "cache")


def seconds_per_step(batches: Iterator[Any], matrix: torch.Tensor) -> float:
    next(batches)
    started = time.perf_counter()
    for _ in range(STEPS):
        next(batches)
        for _ in range(4):
            matrix @ matrix
    return (time.perf_counter() - started) / STEPS


def main() -> None:
    torch.set_num_threads(1)  # one core trains, the other feeds
    with tempfile.TemporaryDirectory() as folder:
        cache, matrix = build(Path(folder)), torch.randn(SIDE, SIDE)
        kinds = {
            "alone": lambda: repeat(None),
            "batches": lambda: Loader(cache, global_batch_size=BATCH, columns=["latents"], collate="stored").forever(),
            "features": lambda: Loader(
                cache,
                global_batch_size=BATCH,
                columns=["latents", "clip_pooled"],
                collate="stored",
                features={"lune": LogitNormalTimes()},
                identify=["row"],
            ).forever(),
        }
        best = dict.fromkeys(kinds, float("inf"))
        for _ in range(ROUNDS):
            for name, make in kinds.items():
                best[name] = min(best[name], seconds_per_step(make(), matrix))
        for name, seconds in best.items():
            print(f"{name:10} {seconds * 1000:8.2f} ms a step   {seconds / best['alone'] - 1:+7.1%}")
        more = best["features"] / best["alone"] - 1
        print(f"features / alone: {more:+.1%}  goal ≤ +3.0%  {'met' if more <= 0.03 else 'MISSED'}")


if __name__ == "__main__":
    main()
