"""The recipe that runs a teacher on the rows of a cache, and the size of its layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from forebay.cache.records import Record
from forebay.columns import Array, Column, Columns, Dtype, Ragged
from forebay.errors import RecipeInvalid, TeacherUnusable
from forebay.recipe import RecipeHooks, Rows, check_fields
from forebay.teachers.batched_forward import BatchedForward, LoadedTeacher, fit_batch, load_once, unload
from forebay.teachers.built_in import T5, Clip, Latents
from forebay.teachers.model_files import is_on_hub
from forebay.teachers.protocol import Output, Teacher, known_teacher, runner
from forebay.teachers.shared_prompts import shared_columns, shared_rows
from forebay.teachers.teacher_samples import Prompts, Samples, read_samples
from forebay.teachers.timesteps import BUCKETS, check_buckets

T_BUCKETS = "t_buckets"  # the constant that holds the grid of a timed teacher
MEMO_BYTES = 256 * 1024 * 1024
MOST_CHUNK_BYTES = 4 * 1024**3
FLOATS = ("float32", "float16", "bfloat16", "float64")  # models compute in the first three
UNUSED: dict[str, Any] = {
    "buckets": (), "batch_size": 1, "batch_timesteps": False, "dtype": "float32", "stored": "float32", "seed": 0,
    "prompt_column": "", "prompt_key": None,
}  # fmt: skip


class TeacherRecipe(RecipeHooks, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Run one teacher on every row. It adds one layer; `fb.build_layers` adds several, one model at a time.

    The model computes in `dtype`; its outputs are stored as `stored`. A forward has `batch_size` samples, with
    `batch_timesteps` at all buckets. A prompt is the text in `prompt_column`, or the value of `prompt_key` in the JSON
    there. `device`, `memory_limit`, `memo_bytes` and `requested_batch_size` are not part of the identity.
    """

    kind: ClassVar[str] = "teacher"
    revision: ClassVar[int] = 1
    workers: ClassVar[int] = 0  # every process would load the model

    teacher: Any  # a Teacher, or its fields in a recipe that is read back
    buckets: tuple[float, ...] = BUCKETS
    batch_size: int = 8
    batch_timesteps: bool = False
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    stored: Dtype = "float16"
    seed: int = 0
    ids: str = "id"
    prompt_column: str = "data"
    prompt_key: str | None = None
    # The batch size that was asked for, where it was halved to fit in memory. On disk it has its first name.
    requested_batch_size: int = msgspec.field(default=0, name="halved_from")
    device: str = "auto"
    memory_limit: int | None = None
    memo_bytes: int = MEMO_BYTES

    def __post_init__(self) -> None:
        teacher = known_teacher(self.teacher)
        self._set("teacher", teacher)
        if teacher.timed:
            self._set("buckets", check_buckets(self.buckets))
        check_fields(self)
        if self.batch_size < 1:
            raise RecipeInvalid(f"batch_size is {self.batch_size}; it must be at least 1")
        if self.dtype not in FLOATS[:3] or self.stored not in FLOATS:
            raise RecipeInvalid(
                f"dtype is '{self.dtype}' and stored is '{self.stored}'; models compute in {', '.join(FLOATS[:3])}, "
                f"and outputs are stored as one of these or float64"
            )
        for name in self._unused():  # unused fields are not part of the identity
            self._set(name, UNUSED[name])

    def _set(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)

    def _unused(self) -> list[str]:
        """Return the fields that have no effect for this teacher."""
        unused = [] if self.model.timed else ["buckets", "batch_timesteps"]
        unused += [] if self.model.prompted else ["prompt_column", "prompt_key"]
        unused += (
            ["batch_size", "batch_timesteps", "dtype", "stored", "seed"] if self.model.depends_on == "nothing" else []
        )
        return unused

    @property
    def model(self) -> Teacher:
        teacher: Teacher = self.teacher
        return teacher

    @property
    def default_layer(self) -> str:
        return self.model.layer_name()

    @property
    def located(self) -> tuple[str, ...]:  # type: ignore[override]  # the fields of the teacher decide
        return (
            "device",
            "memory_limit",
            "memo_bytes",
            "halved_from",
            *(f"teacher.{name}" for name in self.model.located),
        )

    @property
    def reads(self) -> tuple[str, ...]:
        prompts = (self.prompt_column,) if self.model.prompted else ()
        return tuple(dict.fromkeys([self.ids, *self.model.inputs(), *prompts]))

    def columns(self) -> tuple[Column, ...]:
        outputs = self._outputs()
        if self.model.depends_on == "prompt":
            return shared_columns(outputs, self.model.layer_name())
        steps = (len(self.buckets),) if self.model.timed else ()
        return tuple(
            Column(name=name, dtype=dtype, shape=(*steps, *output.shape)) for name, (output, dtype) in outputs.items()
        )

    def constants(self) -> Mapping[str, Array]:
        grid = {T_BUCKETS: np.array(self.buckets, np.float64)} if self.model.timed else {}
        return {**grid, **self.model.constants(self.buckets)}

    def dependencies(self) -> Mapping[str, str]:
        revision = self.model.revision
        return {**self.model.files(), **({"teacher_revision": str(revision)} if revision != 1 else {})}

    def on_hub(self) -> tuple[str, ...]:
        """Return the models and weights of the teacher that would be downloaded."""
        places = [getattr(self.model, name) for name in self.model.located]
        return tuple(place for place in places if isinstance(place, str) and is_on_hub(place))

    def versions(self) -> Mapping[str, str]:
        """Return the versions of libraries and, with torch, the device: bits are reproducible on one device only."""
        found = self.model.versions()
        return {**found, "device": runner("loading").device_facts(self.device)} if "torch" in found else found

    def settled(self, kept: Mapping[str, Any] | None, survey: Any) -> tuple["TeacherRecipe", tuple[str, ...]]:
        """Return the recipe with a batch size that fits in memory: found before the first chunk, then kept."""
        if kept is not None:
            if kept.get("halved_from") != self.batch_size:
                return self, ()
            sizes = {"batch_size": kept["batch_size"], "requested_batch_size": kept["halved_from"]}
            return msgspec.structs.replace(self, **sizes), ()
        if self.model.depends_on == "nothing":
            return self, ()
        rows = survey.rows(self.reads, self.batch_size)
        samples = self._samples(rows) if rows else None
        if samples is None or not samples.present.any():
            return self, () if samples is None else _no_prompts(samples)
        self._load()  # the memory for loading is the same for any batch
        bad: list[int] = []  # per attempt, the number of results that are not finite
        size = fit_batch(self.batch_size, self.memory_limit, lambda size: bad.append(self._try_batch(samples, size)))
        if bad[-1]:
            self._check_finite(samples, size)
        if size == self.batch_size:
            return self, ()
        note = f"batch_size is {size}, not {self.batch_size}, to fit in memory; the recipe keeps it"
        return msgspec.structs.replace(self, batch_size=size, requested_batch_size=self.batch_size), (note,)

    def make(self, rows: Columns) -> Rows:
        samples = self._samples(rows)
        asked = np.flatnonzero(samples.present).tolist()
        distinct = {samples.prompts[row] for row in asked} if self.model.depends_on == "prompt" else set()
        self._check_size(len(distinct) or len(samples))
        teacher = self._load() if asked and self.model.depends_on != "nothing" else None
        if self.model.depends_on == "prompt":
            name = self.model.layer_name()
            columns, samples = shared_rows(self._forward_with(), teacher, samples, name)
            counts: dict[str, int | float | list[int]] = {"prompts": len(asked), "distinct_prompts": len(distinct)}
            return Rows(columns, samples.failures, counts, samples.present)
        if teacher is None:
            return Rows(self._spread({}, [], len(samples)), samples.failures, {}, samples.present)
        made, bad = self._forward_with().run(teacher, samples, asked)
        samples = samples.without({asked[at]: detail for at, detail in bad.items()})
        good = [at for at in range(len(asked)) if at not in bad]
        kept = {name: values[good] for name, values in made.items()} if bad else made
        return Rows(self._spread(kept, [asked[at] for at in good], len(samples)), samples.failures, {}, samples.present)

    def release(self) -> tuple[str, ...]:
        return unload()

    def _check_size(self, rows: int) -> None:
        """Raise for a chunk that is too large to be made in memory, before the teacher runs."""
        needed = rows * sum(column.item_bytes for column in self.columns())
        if needed > MOST_CHUNK_BYTES:
            raise RecipeInvalid(
                f"a chunk of {rows:,} rows takes {needed:,} bytes of '{self.default_layer}', more than the "
                f"limit of {MOST_CHUNK_BYTES:,}; build the base layer in smaller chunks (its chunk_bytes)"
            )

    def _spread(self, made: Mapping[str, Array], rows: list[int], count: int) -> dict[str, Array | Ragged]:
        """Return results at their rows; absent rows are zero, and marked by their presence bits."""
        if made and len(rows) == count:
            return dict(made)
        columns: dict[str, Array | Ragged] = {}
        for column in self.columns():
            values = np.zeros((count, *column.shape), column.array_dtype)
            if made:
                values[rows] = made[column.name]
            columns[column.name] = values
        return columns

    def _try_batch(self, samples: Samples, size: int) -> int:
        """Run one forward of `size` samples, at one bucket or all, and return the number of results not finite."""
        row = int(np.flatnonzero(samples.present)[0])
        forward = self._forward_with(size)
        if not self.batch_timesteps:
            forward = replace(forward, buckets=self.buckets[:1])
        return len(forward.run(self._load(), samples, [row] * size)[1])

    def _check_finite(self, samples: Samples, size: int) -> None:
        """Raise for a model whose results are not finite for any of the first samples, before the layer is begun."""
        rows = np.flatnonzero(samples.present).tolist()
        _, bad = self._forward_with(size).run(self._load(), samples, rows)
        if len(bad) == len(rows) > 1:
            raise TeacherUnusable(
                self.default_layer,
                f"it returns {bad[0]}, for every one of the first {len(rows)} samples; check its weights, or compute "
                f"and store in a wider type (dtype is {self.dtype}, stored is {self.stored})",
            )

    def _load(self) -> LoadedTeacher:
        return load_once(self.model, self.device, self.dtype, self.memo_bytes)

    def _samples(self, rows: Columns) -> Samples:
        prompts = Prompts(self.prompt_column, self.prompt_key) if self.model.prompted else None
        return read_samples(rows, self.ids, prompts)

    def _outputs(self) -> dict[str, tuple[Output, Dtype]]:
        return {output.name: (output, output.dtype or self.stored) for output in self.model.outputs()}

    def _forward_with(self, batch_size: int | None = None) -> BatchedForward:
        return BatchedForward(
            outputs=self._outputs(),
            inputs=self.model.inputs(),
            buckets=self.buckets,
            batch_size=batch_size or self.batch_size,
            all_timesteps=self.batch_timesteps,
            seed=self.seed,
        )


def _no_prompts(samples: Samples) -> tuple[str, ...]:
    """Return notes on first rows without a prompt, which most likely is in another column or key."""
    details = sorted({failure.detail for failure in samples.failures})
    return tuple(f"the first {len(samples)} rows: {one}; are prompt_column and prompt_key right?" for one in details)


def encodings(
    *,
    vae: str | None = None,
    t5: str | None = None,
    clip: str | None = None,
    size: int = 512,
    pad_color: Sequence[int] = (114, 114, 114),
    storage: Literal["raw", "jpeg"] = "raw",
    sample: Literal["mean", "seeded"] = "mean",
    max_length: int = 128,
    **fields: Any,
) -> dict[str, TeacherRecipe]:
    """Return a recipe for each model that is named: latents, T5 states, CLIP states. `fields` are recipe fields."""
    teachers: list[Teacher] = []
    red, green, blue = pad_color
    if vae is not None:
        teachers.append(Latents(vae=vae, size=size, pad_color=(red, green, blue), storage=storage, sample=sample))
    if t5 is not None:
        teachers.append(T5(model=t5, max_length=max_length))
    if clip is not None:
        teachers.append(Clip(model=clip))
    return {teacher.layer_name(): TeacherRecipe(teacher=teacher, **fields) for teacher in teachers}


class ColumnSize(Record, frozen=True, kw_only=True):
    """The size of one column; for columns stored once per distinct prompt, an upper bound."""

    layer: str
    column: str
    shape: tuple[int, ...]  # of one row
    dtype: str
    row_bytes: int
    bytes: int


class TeacherEstimate(Record, frozen=True, kw_only=True):
    """The size of the layers of some teachers."""

    rows: int
    columns: tuple[ColumnSize, ...]
    row_bytes: int
    bytes: int
    free_bytes: int | None = None
    fits: bool = True


def estimate_teachers(
    recipes: Mapping[str, TeacherRecipe], rows: int, *, free_bytes: int | None = None
) -> TeacherEstimate:
    """Return the size of every column of the layers for a number of rows, and their sum."""
    found = tuple(size for layer, recipe in recipes.items() for size in _sizes(layer, recipe, rows))
    total = sum(size.bytes for size in found)
    return TeacherEstimate(
        rows=rows,
        columns=found,
        row_bytes=sum(size.row_bytes for size in found),
        bytes=total,
        free_bytes=free_bytes,
        fits=free_bytes is None or total <= free_bytes,
    )


def _sizes(layer: str, recipe: TeacherRecipe, rows: int) -> list[ColumnSize]:
    stored = [
        ColumnSize(
            layer=layer,
            column=column.name,
            shape=column.shape,
            dtype=column.dtype,
            row_bytes=column.item_bytes,
            bytes=column.item_bytes * rows,
        )
        for column in recipe.columns()
    ]
    constant = [
        ColumnSize(
            layer=layer,
            column=name,
            shape=tuple(values.shape),
            dtype=str(values.dtype),
            row_bytes=0,
            bytes=values.dtype.itemsize * prod(values.shape),
        )
        for name, values in recipe.constants().items()
    ]
    return stored + constant
