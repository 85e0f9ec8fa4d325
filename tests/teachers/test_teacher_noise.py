"""Noise is a function of (seed, sample, bucket), and of nothing else."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from forebay.teachers.teacher_samples import noise_keys, normal


def test_noise_of_a_sample_does_not_depend_on_its_companions() -> None:
    keys, buckets = noise_keys([b"a", b"b", b"c"]), np.array([0, 5, 9])
    together = normal(7, keys, buckets, (2, 3, 5))
    alone = [normal(7, keys[row : row + 1], buckets[row : row + 1], (2, 3, 5))[0] for row in range(3)]
    assert np.array_equal(together, np.stack(alone))
    assert np.array_equal(normal(7, keys, buckets, (31,))[:, :30].reshape(3, 2, 3, 5), together)


def test_seed_sample_bucket_and_purpose_each_change_it() -> None:
    keys = noise_keys([b"a", b"b"])
    draws = [
        normal(0, keys[:1], np.array([0]), (512,)),
        normal(1, keys[:1], np.array([0]), (512,)),
        normal(0, keys[1:], np.array([0]), (512,)),
        normal(0, keys[:1], np.array([1]), (512,)),
        normal(0, keys[:1], np.array([0]), (512,), "latents"),
    ]
    likeness = np.corrcoef(np.concatenate(draws)) - np.eye(len(draws))
    assert np.abs(likeness).max() < 0.2


def test_it_is_standard_normal() -> None:
    drawn = normal(3, noise_keys([str(row).encode() for row in range(200)]), np.zeros(200, np.int64), (500,))
    assert drawn.dtype == np.float32
    assert abs(drawn.mean()) < 0.01
    assert abs(drawn.std() - 1) < 0.01
    assert abs((np.abs(drawn) < 1).mean() - 0.6827) < 0.005
    assert abs((np.abs(drawn) < 2).mean() - 0.9545) < 0.005
    assert abs(np.corrcoef(drawn[:, 0::4].ravel(), drawn[:, 1::4].ravel())[0, 1]) < 0.02


def test_the_lines_of_the_format_draw_the_same_noise() -> None:
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    names: dict[str, Any] = {}
    exec(re.search(r"## Noise of teachers.*?```python\n(.*?)```", page, re.DOTALL)[1], names)  # type: ignore[index]
    for seed, sample, bucket, shape, purpose in (
        (0, b"a.jpg", 0, (4, 8, 8), "noise"),
        (7, b"prompts.txt@812", 9, (3, 5), "latents"),
        (2**40, b"", 3, (1,), "noise"),
    ):
        ours = normal(seed, noise_keys([sample]), np.array([bucket]), shape, purpose)[0]
        assert np.array_equal(names["noise"](seed, sample, bucket, ours.size, purpose).reshape(shape), ours)


def test_it_is_pinned() -> None:
    """Features that were cached must come out again: this may change with a new revision of the recipe only."""
    drawn = normal(0, noise_keys([b"a"]), np.array([2]), (4,))
    assert np.allclose(drawn[0], [-0.893745, 0.053109, -0.161765, -1.050008], atol=1e-5)
