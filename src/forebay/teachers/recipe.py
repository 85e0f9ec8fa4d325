"""The recipe that runs a teacher on the rows of a cache."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from forebay.columns import Array, Column, Columns, Dtype, Ragged
from forebay.errors import RecipeInvalid
from forebay.fields import Size
from forebay.recipe import RecipeDocument, RecipeHooks, RecipeMeta, Rows, check_fields
from forebay.teachers.batched_forward import (
    BatchedForward,
    LoadedTeacher,
    device_memory,
    fit_batch,
    load_once,
    unload,
)  # fmt: skip
from forebay.teachers.built_in import known_teacher
from forebay.teachers.prompt_columns import EMPTY, shared_columns, shared_rows
from forebay.teachers.protocol import Output, Teacher, is_on_hub, runner, unusable
from forebay.teachers.teacher_samples import BUCKETS, Prompts, TeacherSamples, check_buckets, read_samples

UNUSABLE = "unusable"  # the failure reason of a row whose content a teacher cannot process
T_BUCKETS = "t_buckets"  # the constant that holds the grid of a timed teacher
MOST_CHUNK_BYTES = 4 * 1024**3
FITTING_CHUNK_BYTES = 128_000_000
# Fields that do not decide whether the features of two layers are comparable.
_NOT_COMPARED = {"batch_size", "batch_timesteps", "device", "memory_limit", "requested_batch_size", "dtype", "ids",
                 "prompt_column", "prompt_key", "seed"}  # fmt: skip
_PATHS = {"vae", "model", "tokenizer", "unet", "weights", "pad_color"}  # of a teacher; hashes of files are compared


class TeacherRecipe(
    RecipeHooks, msgspec.Struct, metaclass=RecipeMeta, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Run one teacher on every row. It adds one layer; `fb.build_layers` adds several, one model at a time.

    The model computes in `dtype`; its outputs are stored as `stored`. A forward has `batch_size` samples, with
    `batch_timesteps` at all buckets. A prompt is the text in `prompt_column`, or the value of `prompt_key` in the JSON
    there. `device`, `memory_limit` and `requested_batch_size` are not part of the identity.
    """

    kind: ClassVar[str] = "teacher"
    revision: ClassVar[int] = 1
    teacher: Any  # a Teacher, or its fields in a recipe that is read back
    buckets: Annotated[
        tuple[float, ...],
        Meta(description="Timestep in [0, 1] (repeatable).", extra={"flags": ["--bucket"], "default": ".05 .15 … .95"}),
    ] = BUCKETS
    batch_size: Annotated[int, Meta(ge=1, description="Samples per forward pass.")] = 8
    batch_timesteps: Annotated[
        bool,
        Meta(
            description="Run all buckets in one forward pass.",
            extra={"flags": ["--batch-timesteps/--single-timesteps"], "default": "single"},
        ),
    ] = False
    dtype: Annotated[Literal["float32", "float16", "bfloat16"], Meta(description="Compute dtype.")] = "float32"
    stored: Annotated[Literal["float32", "float16", "bfloat16", "float64"], Meta(description="Storage dtype.")] = (
        "float16"
    )
    seed: Annotated[int, Meta(description="Random seed for all noise.")] = 0
    ids: str = "id"
    prompt_column: Annotated[
        str, Meta(description="Column with the prompts.", extra={"metavar": "COLUMN", "default": "by the base layer"})
    ] = "data"
    prompt_key: Annotated[
        str | None,
        Meta(
            description="Key of the prompt, if a row is JSON.",
            extra={"metavar": "KEY", "default": "images: caption"},
        ),
    ] = None
    empty_prompt: Annotated[
        bool,
        Meta(
            description="Also encode the empty prompt, once for a layer, for classifier-free guidance.",
            extra={"flags": ["--empty-prompt"]},
        ),
    ] = False
    requested_batch_size: int = 0  # where it was halved to fit in memory
    device: Annotated[
        str, Meta(description="Device for the models: cpu, cuda, cuda:1, mps; several: cuda:0,cuda:1.")
    ] = "auto"
    memory_limit: Annotated[
        Size | None, Meta(description="Memory limit of a forward pass; batches are halved to fit.")
    ] = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "teacher", known_teacher(self.teacher))
        buckets = check_buckets(self.buckets) if self.model.timed else ()
        msgspec.structs.force_setattr(self, "buckets", buckets)
        check_fields(self)
        for name, value in self.without_effect().items():
            msgspec.structs.force_setattr(self, name, value)

    def without_effect(self) -> dict[str, Any]:
        """Return the fields that have no effect for this teacher: each has one value, so it does not identify a layer.

        With `located`, which has the fields that say where and how to run it, this is the identity of a recipe.
        """
        model, computes = self.model, self.model.depends_on != "nothing"
        fields: dict[str, Any] = {}
        if not model.prompted:
            fields |= {"prompt_column": "", "prompt_key": None}
        if not model.needs_ids:
            fields |= {"ids": ""}
        if not computes:
            fields |= {"batch_size": 1, "dtype": "float32", "stored": "float32"}
        if not (model.timed and computes):
            fields |= {"batch_timesteps": False}
        if not (model.needs_ids and computes):
            fields |= {"seed": 0}
        return fields if model.depends_on == "prompt" else {**fields, "empty_prompt": False}

    @staticmethod
    def identity_of(document: RecipeDocument) -> dict[str, object]:
        """Return the identity that makes two layers comparable: the teacher's fields, and hashes of its files."""
        teacher = dict(document.fields["teacher"])
        fields = {name: value for name, value in document.fields.items() if name not in {*_NOT_COMPARED, "teacher"}}
        fields |= {f"teacher {name}": value for name, value in teacher.items() if name not in _PATHS}
        files = sorted(digest for name, digest in document.dependencies.items() if not name.startswith("layer "))
        return {**fields, "weights": files}

    @property
    def model(self) -> Teacher:
        teacher: Teacher = self.teacher
        return teacher

    @property
    def workers(self) -> int:  # type: ignore[override]  # the devices decide
        """One process for each device, if there are several; otherwise this one, as every process loads the model."""
        return len(self._devices) if len(self._devices) > 1 else 0

    @property
    def default_layer(self) -> str:
        return self.model.layer_name()

    @property
    def located(self) -> tuple[str, ...]:  # type: ignore[override]  # the fields of the teacher decide
        run = ("device", "memory_limit", "requested_batch_size")
        return (*run, *(f"teacher.{name}" for name in self.model.located))

    @property
    def reads(self) -> tuple[str, ...]:
        prompts = (self.prompt_column,) if self.model.prompted else ()
        ids = (self.ids,) if self.model.needs_ids else ()
        return tuple(dict.fromkeys([*ids, *self.model.inputs(), *prompts]))

    def columns(self) -> tuple[Column, ...]:
        outputs = self._outputs()
        if self.model.depends_on == "prompt":
            return shared_columns(outputs, self.model.layer_name())
        steps = (len(self.buckets),) if self.model.timed else ()
        return tuple(
            Column(name=name, dtype=dtype, shape=(*steps, *output.shape), ragged=output.ragged)
            for name, (output, dtype) in outputs.items()
        )

    def constants(self) -> Mapping[str, Array]:
        return {**self.known_constants(), **(self._of_the_empty_prompt() if self.empty_prompt else {})}

    def known_constants(self) -> Mapping[str, Array]:
        """Return the constants for which no model is run."""
        grid = {T_BUCKETS: np.array(self.buckets, np.float64)} if self.model.timed else {}
        return {**grid, **self.model.constants(self.buckets)}

    def _of_the_empty_prompt(self) -> dict[str, Array]:
        ids, keys = ("the empty prompt",), np.zeros(1, np.uint64)
        samples = TeacherSamples(ids, keys, {}, prompts=("",), present=np.ones(1, np.bool_), failures=())
        outputs, bad = self._forward_with().run(self._load(), samples, [0])
        if bad:
            raise unusable(self.default_layer, f"of the empty prompt it returns {bad[0]}")
        return {f"{name}{EMPTY}": np.ascontiguousarray(values[0]) for name, values in outputs.items()}

    def dependencies(self) -> Mapping[str, str]:
        return {**self.model.files(), "teacher_revision": str(self.model.revision)}

    def on_hub(self) -> tuple[str, ...]:
        """Return the models and weights of the teacher that would be downloaded."""
        models = [getattr(self.model, name) for name in self.model.located]
        return tuple(model for model in models if isinstance(model, str) and is_on_hub(model))

    def versions(self) -> Mapping[str, str]:
        """Return the versions of libraries and, with torch, the device: bits are reproducible on one device only."""
        libraries = self.model.versions()
        device = {"device": runner("devices").device_facts(self.device)} if "torch" in libraries else {}
        return {**libraries, **device}

    def settled(self, stored: Mapping[str, Any] | None, survey: Any) -> tuple["TeacherRecipe", tuple[str, ...]]:
        """Return the recipe with the type it computes in, and a batch size that fits in memory.

        The latter is found before the first chunk, then stored.
        """
        wide = self.dtype if self.model.depends_on == "nothing" else self.model.computes_in(self.dtype)
        if wide != self.dtype:
            resolved, notes = msgspec.structs.replace(self, dtype=wide).settled(stored, survey)
            note = f"'{self.default_layer}' computes in {wide}: the configuration of its model says so"
            return resolved, (*notes, note)
        if stored is not None:
            if stored.get("requested_batch_size") != self.batch_size:
                return self, ()
            sizes = {name: stored[name] for name in ("batch_size", "requested_batch_size")}
            return msgspec.structs.replace(self, **sizes), ()
        if self.model.depends_on == "nothing":
            return self, ()
        rows = survey.rows(self.reads, self.batch_size)
        samples = self._samples(rows) if rows else None
        if samples is None or not samples.present.any():
            return self, () if samples is None else _no_prompts(samples)
        self._load()  # the memory for loading is the same for any batch
        bad: list[int] = []  # per attempt, the number of results that are not finite
        memory = device_memory(self._devices[0])
        size = fit_batch(
            self.batch_size, self.memory_limit, lambda size: bad.append(self._try_batch(samples, size)), memory
        )
        if bad[-1]:
            self._check_finite(samples, size)
        if len(self._devices) > 1:
            unload()  # workers load it
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
            for output, _ in self._outputs().values():
                if isinstance(states := columns[output.name], Ragged) and output.ragged:
                    counts |= {"tokens": len(states.values), "padded_tokens": output.most * len(distinct)}
            return Rows(columns, samples.failures, counts, samples.present)
        if teacher is None:
            return Rows(self._spread({}, [], len(samples)), samples.failures, {}, samples.present)
        outputs, bad = self._forward_with().run(teacher, samples, asked)
        samples = samples.without({asked[at]: detail for at, detail in bad.items()})
        good = [at for at in range(len(asked)) if at not in bad]
        usable = {name: values[good] for name, values in outputs.items()} if bad else outputs
        return Rows(
            self._spread(usable, [asked[at] for at in good], len(samples)), samples.failures, {}, samples.present
        )

    def run_at(self, times: tuple[float, ...], rows: Columns) -> dict[str, Array]:
        """Return the teacher's outputs for the present rows at any times, `(rows, times, …)` per output.

        The noise of a time is that of the bucket with its number.
        """
        samples = self._samples(rows)
        asked = np.flatnonzero(samples.present).tolist()
        if not asked:
            return {}
        outputs, bad = replace(self._forward_with(), buckets=times).run(self._load(), samples, asked)
        return {name: np.delete(values, list(bad), axis=0) for name, values in outputs.items()}

    def release(self) -> tuple[str, ...]:
        return unload()

    def _check_size(self, rows: int) -> None:
        """Raise for a chunk that is too large to be made in memory, before the teacher runs."""
        needed = rows * self._row_bytes()
        if needed > MOST_CHUNK_BYTES:
            raise RecipeInvalid(
                f"a chunk of {rows:,} rows takes {needed:,} bytes of '{self.default_layer}', more than "
                f"the limit of {MOST_CHUNK_BYTES:,}",
                hint=f"build the base layer again in chunks of about {self.fitting_rows():,} rows (chunk_rows "
                "of a raw cache, chunk_bytes of any)",
            )

    def fitting_rows(self) -> int:
        """Return the rows per chunk for 128 MB of outputs."""
        return max(1, FITTING_CHUNK_BYTES // max(1, self._row_bytes()))

    def _row_bytes(self) -> int:
        return sum(self.most_bytes(column) for column in self.columns())

    def most_bytes(self, column: Column) -> int:
        """Return the largest number of bytes of one row of a column."""
        outputs = self._outputs()
        return column.item_bytes * (outputs[column.name][0].most if column.name in outputs else 1)

    @staticmethod
    def figures(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
        """Return the stored share of padded states, if only real tokens are stored."""
        padded = statistics.get("padded_tokens", 0)
        return {"tokens_stored": f"{statistics['tokens'] / padded:.1%} of the bytes with padding"} if padded else {}

    def _spread(self, outputs: Mapping[str, Array], rows: list[int], count: int) -> dict[str, Array | Ragged]:
        """Return results at their rows; absent rows are zero, or empty if ragged, as their presence bits say."""
        columns: dict[str, Array | Ragged] = {}
        for column in self.columns():
            if column.ragged:
                each = [np.zeros((0, *column.shape), column.array_dtype)] * count
                for row, own in zip(rows, outputs.get(column.name, ()), strict=False):
                    each[row] = own
                columns[column.name] = Ragged.of(each, column.array_dtype, column.shape)
                continue
            if outputs and len(rows) == count:
                columns[column.name] = outputs[column.name]
                continue
            values = np.zeros((count, *column.shape), column.array_dtype)
            if outputs:
                values[rows] = outputs[column.name]
            columns[column.name] = values
        return columns

    def _try_batch(self, samples: TeacherSamples, size: int) -> int:
        """Run one forward of `size` samples, at one bucket or all, and return the number of results not finite."""
        row = int(np.flatnonzero(samples.present)[0])
        forward = self._forward_with(size)
        if not self.batch_timesteps:
            forward = replace(forward, buckets=self.buckets[:1])
        return len(forward.run(self._load(), samples, [row] * size)[1])

    def _check_finite(self, samples: TeacherSamples, size: int) -> None:
        """Raise for a model whose results are not finite for any of the first samples, before the layer is begun."""
        rows = np.flatnonzero(samples.present).tolist()
        _, bad = self._forward_with(size).run(self._load(), samples, rows)
        if len(bad) == len(rows) > 1:
            raise unusable(
                self.default_layer,
                f"it returns {bad[0]}, for every one of the first {len(rows)} samples",
                hint=f"check its weights, or compute and store in a wider type (dtype is {self.dtype}, stored "
                f"is {self.stored})",
            )

    def _load(self) -> LoadedTeacher:
        return load_once(self.model, self._devices[0], self.dtype)

    @property
    def _devices(self) -> tuple[str, ...]:
        return tuple(self.device.split(","))

    def placed(self, worker: int) -> "TeacherRecipe":
        """Return the recipe for a worker, which uses one of the devices."""
        return msgspec.structs.replace(self, device=self._devices[worker % len(self._devices)])

    def _samples(self, rows: Columns) -> TeacherSamples:
        prompts = Prompts(self.prompt_column, self.prompt_key) if self.model.prompted else None
        samples = read_samples(rows, self.ids, prompts)
        bad = {row: why for row, why in self.model.unusable(rows).items() if samples.present[row]}
        return samples.without(bad, UNUSABLE)

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


def _no_prompts(samples: TeacherSamples) -> tuple[str, ...]:
    """Return notes on first rows without a prompt, which most likely is in another column or key."""
    details = sorted({failure.detail for failure in samples.failures if failure.reason != UNUSABLE})
    return tuple(f"the first {len(samples)} rows: {one}; are prompt_column and prompt_key right?" for one in details)
