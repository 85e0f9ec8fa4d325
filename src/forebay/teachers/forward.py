"""Asking a teacher about samples, a fixed number at a time.

samples   a b c d e        batch_size 2, three buckets

one bucket at a time       [a b]₀ [a b]₁ [a b]₂  [c d]₀ …  [e e]₂
timesteps together         [a₀ a₁ a₂ b₀ b₁ b₂]  …  [e₀ e₁ e₂ e₀ e₁ e₂]

The last batch is filled with its last sample: kernels are not bit-equal across batch sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.columns import DTYPES, Array, Dtype
from forebay.errors import ForebayError, TeacherOutputInvalid, TeacherRaised
from forebay.teachers.protocol import Batch, Output
from forebay.teachers.samples import Samples
from forebay.teachers.slot import Seated

NO_BUCKETS = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class Asking:
    """How a teacher is asked: what of a recipe shapes a batch and what becomes of its results."""

    outputs: Mapping[str, tuple[Output, Dtype]]
    inputs: tuple[str, ...]
    buckets: tuple[float, ...]  # none where the teacher is not timed
    batch_size: int
    together: bool  # all timesteps in one batch
    seed: int

    def ask(self, seated: Seated, samples: Samples, rows: Sequence[int]) -> tuple[dict[str, Array], dict[int, str]]:
        """The results for some rows, in order: `(rows, [buckets,] *shape)` per output.

        And where among them a number is NaN or infinite as it would be stored: position -> in which output and when.
        """
        steps = (len(self.buckets),) if self.buckets else ()
        found: dict[str, Array] = {
            name: np.empty((len(rows), *steps, *output.shape), DTYPES[dtype][1])
            for name, (output, dtype) in self.outputs.items()
        }
        bad: dict[int, str] = {}
        for at in range(0, len(rows), self.batch_size):
            some = slice(at, at + self.batch_size)
            batch = self._ask_batch(seated, samples, rows[some])
            bad |= {at + place: detail for place, detail in self._not_finite(batch).items()}
            for name, values in batch.items():
                found[name][some] = values if self.buckets else values[:, 0]
        return found, bad

    def _ask_batch(self, seated: Seated, samples: Samples, rows: Sequence[int]) -> dict[str, Array]:
        filled = [*rows, *[rows[-1]] * (self.batch_size - len(rows))]
        every = np.arange(len(self.buckets)) if self.buckets else NO_BUCKETS
        turns = [every] if self.together else [every[turn : turn + 1] for turn in range(len(every))]
        made = [self._forward(seated, samples, filled, turn) for turn in turns]
        return {name: np.concatenate([one[name] for one in made], axis=1)[: len(rows)] for name in self.outputs}

    def _forward(
        self, seated: Seated, samples: Samples, rows: Sequence[int], buckets: NDArray[np.int64]
    ) -> dict[str, Array]:
        """One forward, every sample at each of these buckets: `(rows, buckets, *shape)` per output."""
        batch = self.batch(samples, np.repeat(rows, len(buckets)), np.tile(buckets, len(rows)))
        answer = _answer(seated, batch)
        found = {}
        for name, (output, dtype) in self.outputs.items():
            values, expected = np.asarray(answer[name]) if name in answer else None, (len(batch), *output.shape)
            if values is None or values.shape != expected:
                shape = None if values is None else values.shape
                raise TeacherOutputInvalid(seated.name, name, batch.ids[0], batch.first_moment, shape, expected)
            with np.errstate(over="ignore"):  # `_not_finite` finds what the type cannot hold
                found[name] = values.astype(DTYPES[dtype][1]).reshape(len(rows), len(buckets), *output.shape)
        return found

    def batch(self, samples: Samples, rows: NDArray[np.int64], buckets: NDArray[np.int64]) -> Batch:
        chosen = rows.tolist()
        return Batch(
            ids=tuple(samples.ids[row] for row in chosen),
            columns={name: samples.take(name, chosen) for name in self.inputs},
            prompts=tuple(samples.prompts[row] for row in chosen) if samples.prompts else (),
            t=np.array(self.buckets, np.float32)[buckets] if self.buckets else None,
            buckets=buckets,
            keys=samples.keys[rows],
            seed=self.seed,
        )

    def _not_finite(self, found: Mapping[str, Array]) -> dict[int, str]:
        """Which samples of a batch have a number that is not finite: the first output and bucket of each."""
        bad: dict[int, str] = {}
        for name, values in found.items():
            if values.dtype.kind in "biu":
                continue
            good = np.isfinite(values.astype(np.float32)).reshape(*values.shape[:2], -1).all(axis=-1)
            for sample, bucket in np.argwhere(~good).tolist():
                when = f" at t = {self.buckets[bucket]:g}" if self.buckets else ""
                bad.setdefault(sample, f"NaN or infinity in '{name}'{when}, as {values.dtype}")
        return bad


def _answer(seated: Seated, batch: Batch) -> Mapping[str, Array]:
    """What a teacher says; an error of a library gets the sample and the moment it came at."""
    try:
        return seated(batch)
    except ForebayError:
        raise
    except Exception as error:
        raise TeacherRaised(seated.name, batch.ids[0], batch.first_moment, error) from error
