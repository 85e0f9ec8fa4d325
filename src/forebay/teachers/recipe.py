"""The recipe that runs a teacher on the rows of a cache, the size of its layers, and the layers of a whole pipeline.

recipes = fb.teachers.pipeline("flux", size=1024, noise="noised")     # latents, clip, t5, lune
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from forebay.cache.records import Record
from forebay.columns import Array, Column, Columns, Dtype, Ragged
from forebay.errors import RecipeInvalid, TeacherUnusable
from forebay.fields import Size
from forebay.recipe import RecipeHooks, RecipeMeta, Rows, check_fields
from forebay.teachers.batched_forward import (
    EMPTY,
    BatchedForward,
    LoadedTeacher,
    device_memory,
    fit_batch,
    load_once,
    shared_columns,
    shared_rows,
    unload,
)
from forebay.teachers.built_in import T5, Clip, Latents, Lune, NoiseKind, known_teacher
from forebay.teachers.protocol import Output, Teacher, is_on_hub, pipeline_index, runner, scheduler_config
from forebay.teachers.teacher_samples import BUCKETS, Prompts, TeacherSamples, check_buckets, read_samples

UNUSABLE = "unusable"  # the failure reason of a row whose content a teacher cannot process
T_BUCKETS = "t_buckets"  # the constant that holds the grid of a timed teacher
MEMO_BYTES = 256 * 1024 * 1024
MOST_CHUNK_BYTES = 4 * 1024**3
FITTING_CHUNK_BYTES = 128_000_000
UNUSED: dict[str, Any] = {
    "buckets": (), "batch_size": 1, "batch_timesteps": False, "dtype": "float32", "stored": "float32", "seed": 0,
    "prompt_column": "", "prompt_key": None, "ids": "", "empty_prompt": False,
}  # fmt: skip


class TeacherRecipe(
    RecipeHooks, msgspec.Struct, metaclass=RecipeMeta, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Run one teacher on every row. It adds one layer; `fb.build_layers` adds several, one model at a time.

    The model computes in `dtype`; its outputs are stored as `stored`. A forward has `batch_size` samples, with
    `batch_timesteps` at all buckets. A prompt is the text in `prompt_column`, or the value of `prompt_key` in the JSON
    there. `device`, `memory_limit`, `memo_bytes` and `requested_batch_size` are not part of the identity.
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
    # The batch size that was asked for, where it was halved to fit in memory. On disk it has its first name.
    requested_batch_size: int = msgspec.field(default=0, name="halved_from")
    device: Annotated[
        str, Meta(description="Device for the models: cpu, cuda, cuda:1, mps; several: cuda:0,cuda:1.")
    ] = "auto"
    memory_limit: Annotated[
        Size | None, Meta(description="Memory limit of a forward pass; batches are halved to fit.")
    ] = None
    memo_bytes: int = MEMO_BYTES

    def __post_init__(self) -> None:
        teacher = known_teacher(self.teacher)
        self._set("teacher", teacher)
        if teacher.timed:
            self._set("buckets", check_buckets(self.buckets))
        check_fields(self)
        for name in self._unused():  # unused fields are not part of the identity
            self._set(name, UNUSED[name])

    def _set(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)

    def _unused(self) -> list[str]:
        """Return the fields that have no effect for this teacher."""
        unused = [] if self.model.timed else ["buckets", "batch_timesteps"]
        unused += [] if self.model.prompted else ["prompt_column", "prompt_key"]
        unused += [] if self.model.needs_ids else ["ids", "seed"]
        unused += [] if self.model.depends_on == "prompt" else ["empty_prompt"]
        unused += (
            ["batch_size", "batch_timesteps", "dtype", "stored", "seed"] if self.model.depends_on == "nothing" else []
        )
        return unused

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
        return (
            "device",
            "memory_limit",
            "memo_bytes",
            "halved_from",
            *(() if self.empty_prompt else ("empty_prompt",)),  # layers from before it existed have none
            *(f"teacher.{name}" for name in self.model.located),
            *(f"teacher.{name}" for name in self._at_default()),
        )

    def _at_default(self) -> list[str]:
        """Return the added fields of the teacher that have their default, which do not change the identity."""
        fields = {one.name: one.default for one in msgspec.structs.fields(self.model)}
        return [name for name in self.model.added if getattr(self.model, name) == fields[name]]

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
        made, bad = self._forward_with().run(self._load(), samples, [0])
        if bad:
            raise TeacherUnusable(self.default_layer, f"of the empty prompt it returns {bad[0]}")
        return {f"{name}{EMPTY}": np.ascontiguousarray(values[0]) for name, values in made.items()}

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
        return {**found, "device": runner("devices").device_facts(self.device)} if "torch" in found else found

    def settled(self, kept: Mapping[str, Any] | None, survey: Any) -> tuple["TeacherRecipe", tuple[str, ...]]:
        """Return the recipe with the type it computes in, and a batch size that fits in memory.

        The latter is found before the first chunk, then kept.
        """
        wide = self.dtype if self.model.depends_on == "nothing" else self.model.computes_in(self.dtype)
        if wide != self.dtype:
            found, notes = msgspec.structs.replace(self, dtype=wide).settled(kept, survey)
            return found, (*notes, f"'{self.default_layer}' computes in {wide}: the configuration of its model says so")
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
        made, bad = self._forward_with().run(teacher, samples, asked)
        samples = samples.without({asked[at]: detail for at, detail in bad.items()})
        good = [at for at in range(len(asked)) if at not in bad]
        kept = {name: values[good] for name, values in made.items()} if bad else made
        return Rows(self._spread(kept, [asked[at] for at in good], len(samples)), samples.failures, {}, samples.present)

    def run_at(self, times: tuple[float, ...], rows: Columns) -> dict[str, Array]:
        """Return what the teacher makes of the present rows at any times, `(rows, times, …)` per output.

        The noise of a time is that of the bucket with its number.
        """
        samples = self._samples(rows)
        asked = np.flatnonzero(samples.present).tolist()
        if not asked:
            return {}
        made, bad = replace(self._forward_with(), buckets=times).run(self._load(), samples, asked)
        return {name: np.delete(values, list(bad), axis=0) for name, values in made.items()}

    def release(self) -> tuple[str, ...]:
        return unload()

    def _check_size(self, rows: int) -> None:
        """Raise for a chunk that is too large to be made in memory, before the teacher runs."""
        needed = rows * self._row_bytes()
        if needed > MOST_CHUNK_BYTES:
            raise RecipeInvalid(
                f"a chunk of {rows:,} rows takes {needed:,} bytes of '{self.default_layer}', more than the limit of "
                f"{MOST_CHUNK_BYTES:,}; build the base layer again in chunks of about {self.fitting_rows():,} rows "
                f"(chunk_rows of a raw cache, chunk_bytes of any)"
            )

    def fitting_rows(self) -> int:
        """Return the rows of a chunk of which the teacher makes 128 MB."""
        return max(1, FITTING_CHUNK_BYTES // max(1, self._row_bytes()))

    def _row_bytes(self) -> int:
        return sum(self.most_bytes(column) for column in self.columns())

    def most_bytes(self, column: Column) -> int:
        """Return the bytes of one row of a column, if it has as many values as it can."""
        outputs = self._outputs()
        return column.item_bytes * (outputs[column.name][0].most if column.name in outputs else 1)

    @staticmethod
    def figures(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
        """Return how many of the bytes of padded states are stored, if only real tokens are."""
        padded = statistics.get("padded_tokens", 0)
        return {"tokens_stored": f"{statistics['tokens'] / padded:.1%} of the bytes with padding"} if padded else {}

    def _spread(self, made: Mapping[str, Array], rows: list[int], count: int) -> dict[str, Array | Ragged]:
        """Return results at their rows; absent rows are zero, or empty if ragged, as their presence bits say."""
        columns: dict[str, Array | Ragged] = {}
        for column in self.columns():
            if column.ragged:
                each = [np.zeros((0, *column.shape), column.array_dtype)] * count
                for row, own in zip(rows, made.get(column.name, ()), strict=False):
                    each[row] = own
                columns[column.name] = Ragged.of(each, column.array_dtype, column.shape)
                continue
            if made and len(rows) == count:
                columns[column.name] = made[column.name]
                continue
            values = np.zeros((count, *column.shape), column.array_dtype)
            if made:
                values[rows] = made[column.name]
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
            raise TeacherUnusable(
                self.default_layer,
                f"it returns {bad[0]}, for every one of the first {len(rows)} samples; check its weights, or compute "
                f"and store in a wider type (dtype is {self.dtype}, stored is {self.stored})",
            )

    def _load(self) -> LoadedTeacher:
        return load_once(self.model, self._devices[0], self.dtype, self.memo_bytes)

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
    ragged: bool = False,
    projected: bool = False,
    **fields: Any,
) -> dict[str, TeacherRecipe]:
    """Return a recipe for each model that is named: latents, T5 states, CLIP states. `fields` are recipe fields."""
    teachers: list[Teacher] = []
    red, green, blue = pad_color
    if vae is not None:
        teachers.append(Latents(vae=vae, size=size, pad_color=(red, green, blue), storage=storage, sample=sample))
    if t5 is not None:
        teachers.append(T5(model=t5, max_length=max_length, ragged=ragged))
    if clip is not None:
        teachers.append(Clip(model=clip, projected=projected))
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
    largest_chunk_bytes: int = 0  # of one layer in the largest chunk of the cache, which is made in memory
    notes: tuple[str, ...] = ()  # also the errors of interpolation, where the teacher was run


def estimate_teachers(
    recipes: Mapping[str, TeacherRecipe], rows: int, *, free_bytes: int | None = None, chunk_rows: int = 0
) -> TeacherEstimate:
    """Return the size of every column of the layers for a number of rows, and their sum.

    `chunk_rows` are the rows of the largest chunk of the cache, which bounds the memory of a build.
    """
    found = tuple(size for layer, recipe in recipes.items() for size in _sizes(layer, recipe, rows))
    total = sum(size.bytes for size in found)
    layers = {size.layer: sum(one.row_bytes for one in found if one.layer == size.layer) for size in found}
    largest = max(layers.values(), default=0) * chunk_rows
    return TeacherEstimate(
        rows=rows,
        columns=found,
        row_bytes=sum(size.row_bytes for size in found),
        bytes=total,
        free_bytes=free_bytes,
        fits=(free_bytes is None or total <= free_bytes) and largest <= MOST_CHUNK_BYTES,
        largest_chunk_bytes=largest,
        notes=tuple(_chunk_notes(recipes, layers, chunk_rows)),
    )


def _chunk_notes(recipes: Mapping[str, TeacherRecipe], layers: Mapping[str, int], chunk_rows: int) -> Iterator[str]:
    """Yield what to do about chunks that are too large to be made in little memory, or too dear to be lost."""
    for layer, row_bytes in layers.items():
        if row_bytes * chunk_rows > 4 * FITTING_CHUNK_BYTES:
            too_large = row_bytes * chunk_rows > MOST_CHUNK_BYTES
            yield (
                f"a chunk of {chunk_rows:,} rows makes {row_bytes * chunk_rows:,} bytes of '{layer}' in memory"
                f"{f', more than the limit of {MOST_CHUNK_BYTES:,}' if too_large else ''}; build the base layer in "
                f"chunks of about {recipes[layer].fitting_rows():,} rows"
            )


def _sizes(layer: str, recipe: TeacherRecipe, rows: int) -> list[ColumnSize]:
    stored = [
        ColumnSize(
            layer=layer,
            column=column.name,
            shape=column.shape,
            dtype=column.dtype,
            row_bytes=recipe.most_bytes(column),
            bytes=recipe.most_bytes(column) * rows,
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
        for name, values in recipe.known_constants().items()
    ]
    empty = [
        msgspec.structs.replace(size, column=f"{size.column}{EMPTY}", row_bytes=0, bytes=size.row_bytes)
        for size in stored
        if recipe.empty_prompt and size.column in {output.name for output in recipe.model.outputs()}
    ]
    return stored + constant + empty


Parts = tuple[list[Teacher], dict[str, Any]]  # text encoders, and the fields of the denoiser's teacher


def _stable_diffusion(at: str, max_length: int | None) -> Parts:
    return [Clip(model=f"{at}/text_encoder")], {"unet": f"{at}/unet"}


def _sdxl(at: str, max_length: int | None) -> Parts:
    first = Clip(model=f"{at}/text_encoder", states_layer=-2, keeps=("states",), name="clip_l")
    second = Clip(model=f"{at}/text_encoder_2", states_layer=-2, projected=True, name="clip_g")
    return [first, second], {
        "unet": f"{at}/unet",
        "text": "clip_l_states+clip_g_states",
        "pooled": "clip_g_pooled",
    }


def _sd3(at: str, max_length: int | None) -> Parts:
    texts: list[Teacher] = [
        Clip(model=f"{at}/text_encoder", states_layer=-2, projected=True, name="clip_l"),
        Clip(model=f"{at}/text_encoder_2", states_layer=-2, projected=True, name="clip_g"),
    ]
    if pipeline_index(at).get("text_encoder_3", (None,))[0]:  # SD3 also runs without T5
        texts.append(T5(model=f"{at}/text_encoder_3", max_length=max_length or 256, masked=False))
    return texts, {
        "unet": f"{at}/transformer",
        "text": "+".join(f"{text.layer_name()}_states" for text in texts),
        "pooled": "clip_l_pooled+clip_g_pooled",
    }


def _flux(at: str, max_length: int | None) -> Parts:
    pooled = Clip(model=f"{at}/text_encoder", keeps=("pooled",))
    states = T5(model=f"{at}/text_encoder_2", max_length=max_length or 512, masked=False)
    return [pooled, states], {"unet": f"{at}/transformer", "text": "t5_states", "pooled": "clip_pooled"}


def _dit(at: str, max_length: int | None) -> Parts:
    return [], {"unet": f"{at}/transformer", "text": ""}


PIPELINES: dict[str, Callable[[str, int | None], Parts]] = {
    "DiTPipeline": _dit,
    "FluxPipeline": _flux,
    "StableDiffusion3Pipeline": _sd3,
    "StableDiffusionPipeline": _stable_diffusion,
    "StableDiffusionXLPipeline": _sdxl,
}


def _timesteps(at: str) -> dict[str, float]:
    """Return the timesteps of noise and of data that the pipeline's scheduler passes to its denoiser."""
    config = scheduler_config(at) if pipeline_index(at).get("scheduler") else {}
    last = float(config.get("num_train_timesteps", 1000))
    ends = (0.0, last) if config.get("invert_sigmas") else (last, 0.0)
    return dict(zip(("noise_timestep", "data_timestep"), ends, strict=True))


def pipeline(
    model: str,
    *,
    size: int | None = None,
    pad_color: Sequence[int] = (114, 114, 114),
    storage: Literal["raw", "jpeg"] = "raw",
    sample: Literal["mean", "seeded"] = "mean",
    max_length: int | None = None,
    noise: NoiseKind = "pure",
    labels: str = "",
    denoiser: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, TeacherRecipe]:
    """Return the recipes of a pipeline's layers, in build order: latents, encodings of prompts, denoiser features.

    `model` is the folder of a whole pipeline, or its name on the hub. Latents are made if `size`, that of the images,
    is passed. `max_length` is the number of T5's tokens, by default the pipeline's. `denoiser` are further fields of
    its `Lune`, and `fields` those of all recipes.
    """
    at = model.rstrip("/")
    kind = str(pipeline_index(at).get("_class_name"))
    if kind not in PIPELINES:
        problem = f"its class is {kind}; supported pipelines are {', '.join(PIPELINES)}"
        raise TeacherUnusable(model, f"{problem}; a supported part of another can be used alone, as in vae='{at}/vae'")
    texts, own = PIPELINES[kind](at, max_length)
    teachers: list[Teacher] = []
    if size is not None:
        red, green, blue = pad_color
        teachers.append(
            Latents(vae=f"{at}/vae", size=size, pad_color=(red, green, blue), storage=storage, sample=sample)
        )
    sized = {"image_size": size} if size is not None and noise == "noised" else {}
    lune = Lune(**{**own, **sized, **_timesteps(at), "noise": noise, "labels": labels, **(denoiser or {})})
    timed = {"buckets": fields.pop("buckets")} if "buckets" in fields else {}
    made = {teacher.layer_name(): TeacherRecipe(teacher=teacher, **fields) for teacher in [*teachers, *texts]}
    return {**made, lune.layer_name(): TeacherRecipe(teacher=lune, **fields, **timed)}
