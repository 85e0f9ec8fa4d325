"""A layer of features of any size, made without a teacher; and how the document reads one it holds in memory."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import torch

import forebay as fb
from benchmarks.numbers import NumberSource
from forebay.teachers import BUCKETS
from forebay.teachers.recipe import T_BUCKETS


class NumberRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that are numbers, with ids."""

    kind: ClassVar[str] = "number-rows"
    revision: ClassVar[int] = 1
    sample_ids: ClassVar[str] = "id"
    chunk_rows: int = 500

    def columns(self) -> tuple[fb.Column, ...]:
        return (fb.Column(name="id", dtype="uint8", ragged=True),)

    def chunk_target(self) -> fb.ChunkTarget:
        return fb.ChunkTarget(rows=self.chunk_rows)

    def make(self, samples: Iterable[fb.Sample]) -> fb.Rows:
        return fb.Rows({"id": fb.Ragged.of_bytes([str(sample.data).encode() for sample in samples])})


class FeatureLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Noise by row: `[buckets, 1280]`, or without buckets whatever `width` says."""

    kind: ClassVar[str] = "feature-noise"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("id",)
    name: str = "lune"
    buckets: tuple[float, ...] = BUCKETS
    width: tuple[int, ...] = (1280,)

    def columns(self) -> tuple[fb.Column, ...]:
        steps = (len(self.buckets),) if self.buckets else ()
        return (fb.Column(name=self.name, dtype="float16", shape=(*steps, *self.width)),)

    def constants(self) -> dict[str, np.ndarray]:
        return {T_BUCKETS: np.array(self.buckets)} if self.buckets else {}

    def make(self, rows: dict[str, fb.Ragged]) -> fb.Rows:
        shape = self.columns()[0].shape
        ids = rows["id"]
        seeds = (int(ids[row].tobytes()) for row in range(len(ids)))
        made = [np.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.float16) for seed in seeds]
        return fb.Rows({self.name: np.stack(made)})


def number_cache(root: Path, rows: int) -> None:
    fb.build(root, NumberSource(rows), NumberRows(), workers=0)


def document_features(features: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The document's lookup, line by line, over [rows, 10, 1280] in memory."""
    t_min, t_max, n_buckets = BUCKETS[0], BUCKETS[-1], len(BUCKETS)
    t_step = (t_max - t_min) / (n_buckets - 1)

    def get_features(indices: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        t_clamped = timesteps.clamp(t_min, t_max)
        t_idx_float = (t_clamped - t_min) / t_step
        t_idx_low = t_idx_float.long().clamp(0, n_buckets - 2)
        t_idx_high = (t_idx_low + 1).clamp(0, n_buckets - 1)
        alpha = (t_idx_float - t_idx_low.float()).unsqueeze(-1)
        f_low = features[indices, t_idx_low]
        f_high = features[indices, t_idx_high]
        return (1 - alpha) * f_low + alpha * f_high

    return get_features
