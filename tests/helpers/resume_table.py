"""The resume table of docs/trainers.md, and what each of its tests trains on."""

import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import forebay as fb
from forebay.order.coins import Coins
from forebay.torch import CacheDataset, Loader

TRAINERS = Path(__file__).parents[2] / "docs" / "trainers.md"
ROWS, BATCH, STOP = 64, 8, 10
EPOCH = ROWS // BATCH  # eight batches
STEPS = 3 * EPOCH
Step = tuple[list[int], list[float]]  # the rows of a batch, and what was drawn for them
Train = Callable[[fb.Cache, Path, int, int], list[Step]]  # steps `first` to `last`, from the checkpoint of `first`
Run = tuple[list[Step], list[Step], list[Step]]  # uninterrupted; until it stopped; the rest
HEADING = "| Setup | Rows | Random choices | Test |\n"


def table_lines() -> list[str]:
    _, table = TRAINERS.read_text().split(HEADING)
    return table.split("\n\n")[0].splitlines()[1:]


def exact_parts(test: str) -> list[bool]:
    """Whether rows and random choices are exact, by the line of the table with this test."""
    (cells,) = [line.split("|")[2:4] for line in table_lines() if f"::{test}`" in line]
    return [re.findall(r"^\**(exact|not)\b", cell.strip()) == ["exact"] for cell in cells]


def line(run: Callable[[fb.Cache, Path], Run]) -> Callable[[fb.Cache, Path], None]:
    """The test of a line: its run reads every row once per epoch, and resumes as the table says."""

    @pytest.mark.slow
    @wraps(run)
    def test(cache: fb.Cache, tmp_path: Path) -> None:
        whole, first, rest = run(cache, tmp_path)
        assert (len(whole), len(first), len(rest)) == (STEPS, STOP, STEPS - STOP)
        for begin in range(0, STEPS, EPOCH):
            rows = [row for batch, _ in whole[begin : begin + EPOCH] for row in batch]
            assert sorted(rows) == list(range(ROWS)), "an epoch has every row once"
        resumed = zip(*(first + rest), strict=True)
        parts = zip(resumed, zip(*whole, strict=True), strict=True)
        assert [part == expected for part, expected in parts] == exact_parts(run.__name__)

    return test


def drawn(batch: dict[str, Tensor], coins: Coins) -> dict[str, Tensor]:
    return batch | {"coin": torch.from_numpy(coins.uniform("coin"))}


def step_of(batch: dict[str, Tensor], tokens: str = "tokens") -> Step:
    """A row of numbered tokens begins with its number."""
    return batch[tokens][:, 0].tolist(), batch["coin"].tolist()


def world_size() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def new_loader(cache: fb.Cache, **options: Any) -> Loader:
    return Loader(cache, global_batch_size=BATCH, seed=3, transform=drawn, threads=1, **options)


def new_dataset(cache: fb.Cache, **options: Any) -> CacheDataset:
    return CacheDataset(cache, transform=drawn, seed=3, **options)


def loader_steps(cache: fb.Cache) -> list[Step]:
    return [step_of(batch) for batch in new_loader(cache).forever(STEPS)]
