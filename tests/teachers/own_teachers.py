"""Teachers of a test's own: small, without any model, and telling what they were asked."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

import forebay as fb
from forebay.columns import Array
from forebay.teachers import Batch, Loaded, Output, Teacher

ASKED: list[Batch] = []  # every batch of every teacher here, in order
LOADED: list[str] = []

SENTENCES = (
    "red cat",
    "blue dog",
    "red cat",
    "two dogs",
    "a house",
    "red cat",
    "blue dog",
    "hill",
    "a house",
    "on a hill",
)


class Ramp(Teacher, frozen=True, kw_only=True, tag="ramp"):
    """Features that rise with time from the number of letters in a sample: known at every moment."""

    timed: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("data",)

    width: int = 6
    name: str = "ramp"
    ends: str = ""  # samples that end so get NaN at the last bucket but one

    def outputs(self) -> tuple[Output, ...]:
        return (Output(self.name, (self.width,)),)

    def load(self, device: str, dtype: str) -> Loaded:
        LOADED.append(self.tag())
        return self._answer

    def _answer(self, batch: Batch) -> Mapping[str, Array]:
        ASKED[:] = [*ASKED[-99:], batch]
        letters = [row.tobytes() for row in batch.rows("data")]
        assert batch.t is not None
        found = ramp([len(one) for one in letters], batch.t, self.width)
        bad = [bool(self.ends) and one.endswith(self.ends.encode()) for one in letters]
        found[np.array(bad) & (batch.buckets == batch.buckets.max())] = np.nan
        return {self.name: found}


class Noisy(Teacher, frozen=True, kw_only=True, tag="noisy"):
    """Nothing but noise."""

    timed: ClassVar[bool] = True

    def outputs(self) -> tuple[Output, ...]:
        return (Output("noisy", (3, 4)),)

    def load(self, device: str, dtype: str) -> Loaded:
        return lambda batch: {"noisy": batch.noise((3, 4))}


class Letters(Teacher, frozen=True, kw_only=True, tag="letters"):
    """How often each of eight letters is in a prompt. With `seats`, the seat in the batch shows in the result."""

    prompted: ClassVar[bool] = True
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "prompt"

    seats: float = 0.0
    most: int = 0  # samples that memory holds

    def outputs(self) -> tuple[Output, ...]:
        return (Output("letters", (8,)), Output("long", (), "bool"))

    def load(self, device: str, dtype: str) -> Loaded:
        LOADED.append(self.tag())
        return self._answer

    def _answer(self, batch: Batch) -> Mapping[str, Array]:
        if self.most and len(batch) > self.most:
            raise MemoryError("CUDA out of memory")
        ASKED.append(batch)
        counts = np.array([[prompt.count(letter) for letter in "adegortu"] for prompt in batch.prompts], np.float32)
        counts += self.seats * np.arange(len(batch), dtype=np.float32)[:, None]
        return {"letters": counts, "long": np.array([len(prompt) > 7 for prompt in batch.prompts])}


class Hidden(Teacher, frozen=True, kw_only=True, tag="hidden"):
    """One prompt is so loud that its seat is lost in half precision; of the others it is heard."""

    prompted: ClassVar[bool] = True
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "prompt"

    loud: str

    def outputs(self) -> tuple[Output, ...]:
        return (Output("hidden", ()),)

    def load(self, device: str, dtype: str) -> Loaded:
        return lambda batch: {
            "hidden": np.array([1000 * (prompt == self.loud) for prompt in batch.prompts]) + np.arange(len(batch)) / 100
        }


class Twice(Teacher, frozen=True, kw_only=True, tag="twice"):
    """A teacher of what another said."""

    reads: ClassVar[tuple[str, ...]] = ("letters", "letters_row")

    def outputs(self) -> tuple[Output, ...]:
        return (Output("twice", (8,)),)

    def load(self, device: str, dtype: str) -> Loaded:
        return lambda batch: {"twice": 2 * batch.array("letters")}


class Wrong(Teacher, frozen=True, kw_only=True, tag="wrong"):
    """What does not keep its word."""

    how: Literal["shape", "name", "overflow", "raise"] = "shape"

    def outputs(self) -> tuple[Output, ...]:
        return (Output("wrong", (2,)),)

    def load(self, device: str, dtype: str) -> Loaded:
        if self.how == "raise":
            return lambda batch: {"wrong": np.full((len(batch), 2), 1 // 0)}
        return lambda batch: {
            "wrong" if self.how != "name" else "other": np.full((len(batch), 2 + (self.how == "shape")), 1e6)
        }


class Overflowing(Teacher, frozen=True, kw_only=True, tag="overflowing"):
    """The length of a prompt; of one that holds a word, more than float16 can hold."""

    prompted: ClassVar[bool] = True
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "prompt"

    word: str

    def outputs(self) -> tuple[Output, ...]:
        return (Output("overflowing", (1,)),)

    def load(self, device: str, dtype: str) -> Loaded:
        def lengths(batch: Batch) -> Mapping[str, Array]:
            found = [1e6 if self.word in prompt else len(prompt) for prompt in batch.prompts]
            return {"overflowing": np.array(found, np.float32).reshape(-1, 1)}

        return lengths


class Heavy(Teacher, frozen=True, kw_only=True, tag="heavy"):
    """Holds so many bytes for every sample of a batch, and others while it is loaded."""

    sample_bytes: int
    load_bytes: int = 0

    def outputs(self) -> tuple[Output, ...]:
        return (Output("heavy", ()),)

    def load(self, device: str, dtype: str) -> Loaded:
        np.ones(self.load_bytes, np.uint8).fill(2)
        return lambda batch: {"heavy": np.full(len(batch), np.ones(self.sample_bytes * len(batch), np.uint8).max())}


def ramp(letters: object, moments: Array, width: int = 6) -> Array:
    """What `Ramp` says of samples with so many letters."""
    count = np.asarray(letters, np.float32)[:, None]
    return np.asarray(count + np.asarray(moments, np.float32)[:, None] * np.arange(width, dtype=np.float32))


def prompt_cache(folder: Path, sentences: tuple[str, ...] = SENTENCES, chunk_bytes: int = 60) -> Path:
    """A cache of prompts, a few to a chunk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text("".join(f"{sentence}\n" for sentence in sentences))
    source = fb.sources.lines(folder / "prompts.txt")
    fb.build(folder / "cache", source, fb.RawRecipe(chunk_bytes=chunk_bytes), workers=0)
    return folder / "cache"


def chunks_of(root: Path, layer: str) -> dict[str, bytes]:
    """The bytes of a layer's chunks."""
    return {path.name: path.read_bytes() for path in sorted((root / "layers").glob(f"{layer}.*/0*.safetensors"))}


class Whereabouts(Teacher, frozen=True, kw_only=True, tag="whereabouts"):
    """Says of every sample which device and which process it was asked in."""

    def outputs(self) -> tuple[Output, ...]:
        return (Output("device", (), "int32"), Output("pid", (), "int64"))

    def load(self, device: str, dtype: str) -> Loaded:
        number = int(device.partition(":")[2])
        return lambda batch: {
            "device": np.full(len(batch), number),
            "pid": np.full(len(batch), os.getpid()),
        }
