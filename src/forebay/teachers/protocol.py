"""The base class of teachers, and the protocol that runs one.

    class Brightness(Teacher, frozen=True, tag="brightness"):
        reads: ClassVar[tuple[str, ...]] = ("pixels",)

        def outputs(self) -> tuple[Output, ...]:
            return (Output("brightness", ()),)

        def load(self, device: str, dtype: str) -> Loaded:
            return lambda batch: {"brightness": np.array([pixels.mean() for pixels in batch.rows("pixels")])}

Its fields are its identity. `TeacherRecipe(teacher=Brightness())` adds a layer `brightness`, without registration. To
continue such a layer from the command line, name its class by an entry point in the group `forebay.teachers`.

Find and hash the files of a model, and read its configuration. Pickle files are never loaded.

A model is a folder that `save_pretrained` wrote, or a name on the hub, `org/name` or `org/name/subfolder`. Single
weights are a `.safetensors` file, or `org/name/path/to/file.safetensors`.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Columns, Dtype, Ragged
from forebay.errors import LibraryMissing, ModelUnusable, SourceNotFound, StoreUnavailable
from forebay.teachers.teacher_samples import SHARED_ROW_SUFFIX, normal


@dataclass(frozen=True, slots=True)
class Output:
    """A column that a teacher makes: the shape of one sample's values, at one bucket if the teacher is timed.

    Values are stored in the recipe's `stored` type, unless `dtype` names another. A sample has any number of values of
    a `ragged` output, each of that shape and at most `most` where that is known: the teacher returns them as `Ragged`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype | None = None
    ragged: bool = False
    most: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some samples, each at one bucket if the teacher is timed. A sample may occur more than once."""

    ids: tuple[str, ...]
    columns: Columns  # those that the teacher reads
    prompts: tuple[str, ...]  # empty unless the teacher is `prompted`
    t: NDArray[np.float32] | None  # (samples,), of a timed teacher
    buckets: NDArray[np.int64]  # (samples,), the number of the bucket; 0 without timesteps
    keys: NDArray[np.uint64]  # (samples,), the keys of their noise
    seed: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def first_t(self) -> float | None:
        """The t of the first sample, for errors."""
        return None if self.t is None else float(self.t[0])

    def array(self, column: str) -> Array:
        """Return a column whose rows have one shape, `(samples, …)`, also if it is stored once for equal prompts."""
        values = self._column(column)
        if not isinstance(values, Ragged):
            return values
        if f"{column}{SHARED_ROW_SUFFIX}" not in self.columns or (values.lengths != 1).any():
            raise TypeError(f"'{column}' is ragged; use batch.rows('{column}')")
        return values.values

    def rows(self, column: str) -> list[Array]:
        """Return a column row by row."""
        values = self._column(column)
        return [values[row] for row in range(len(self))]

    def _column(self, column: str) -> Array | Ragged:
        if column not in self.columns:
            read = ", ".join(f"'{name}'" for name in self.columns) or "nothing"
            raise LookupError(f"the teacher does not read '{column}' but {read}; add it to its `reads`")
        return self.columns[column]

    def noise(
        self, shape: tuple[int, ...], purpose: str = "noise", per: Literal["bucket", "sample"] = "bucket"
    ) -> NDArray[np.float32]:
        """Return standard normal numbers per sample and bucket, or per sample, independent of the rest of the batch."""
        buckets = self.buckets if per == "bucket" else np.zeros_like(self.buckets)
        return normal(self.seed, self.keys, buckets, shape, purpose)


TimeDirection = Literal["t0_noise", "t0_data"]  # the end of t that is noise
Loaded = Callable[[Batch], Mapping[str, Array | Ragged]]


class Teacher(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """The base class of teachers. A subclass has a `tag`, which names it in recipes and, by default, its layer.

    `timed` teachers run at every bucket, others once. Outputs that depend on the prompt only (`depends_on = "prompt"`)
    are stored once for each distinct prompt of a chunk; those that depend on nothing are constants, stored once.
    `located` fields are the places of weights, which do not identify them: `files` does.
    """

    timed: ClassVar[bool] = False
    prompted: ClassVar[bool] = False  # whether batches have prompts
    needs_ids: ClassVar[bool] = True  # whether the cache must have sample ids: for noise, and to name failed samples
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "sample"
    revision: ClassVar[int] = 1  # increase it when code changes what is stored: other layers are not reused
    located: ClassVar[tuple[str, ...]] = ()
    libraries: ClassVar[tuple[str, ...]] = ()  # whose versions the outputs depend on
    loaded_by: ClassVar[tuple[str, ...]] = ()  # the module and the class of `forebay.torch.teachers` that run it
    reads: ClassVar[tuple[str, ...]] = ()

    name: str = ""  # of the layer, instead of the tag

    @classmethod
    def tag(cls) -> str:
        return str(cls.__struct_config__.tag)

    def layer_name(self) -> str:
        """Return the default name of the layer."""
        return self.name or self.tag()

    def inputs(self) -> tuple[str, ...]:
        """Return the columns that batches have: `reads`, unless they depend on the fields."""
        return self.reads

    def outputs(self) -> tuple[Output, ...]:
        """Return the columns made of every sample. Must not need the weights: estimates call it."""
        raise NotImplementedError

    def unusable(self, rows: Columns) -> Mapping[int, str]:
        """Return the rows of a chunk that it cannot process -> why. They become absent rows of its layer."""
        return {}

    def constants(self, buckets: tuple[float, ...]) -> Mapping[str, Array]:
        """Return the arrays that are the same for all samples."""
        return {}

    def files(self) -> Mapping[str, str]:
        """Return the hash of every file that the outputs depend on, by name."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """Return the versions of `libraries`."""
        return library_versions(*self.libraries)

    def computes_in(self, dtype: str) -> str:
        """Return the type that it computes in when asked for one: a wider one if the model needs it."""
        return dtype

    def load(self, device: str, dtype: str) -> Loaded:
        """Load the model onto a device, to compute in a dtype, and return a function of batches."""
        if not self.loaded_by:
            raise NotImplementedError
        module, name = self.loaded_by
        loaded: Loaded = getattr(runner(module), name)(self, device, dtype)
        return loaded


ROOM = "forebay.torch.teachers"


def runner(module: str) -> Any:
    """Import a module of `forebay.torch.teachers`."""
    try:
        return import_module(f"{ROOM}.{module}")
    except ModuleNotFoundError as missing:
        raise LibraryMissing(
            f"running a teacher needs '{missing.name!s}', which is not installed",
            hint="pip install 'forebay[teachers]'",
            extra="teachers",
        ) from missing


def library_versions(*names: str) -> dict[str, str]:
    """Return the versions of those libraries that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


CONFIG = "config.json"
PIPELINE = "model_index.json"
SCHEDULER = "scheduler/scheduler_config.json"
SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"
_STEMS = ("model", "diffusion_pytorch_model")
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "spiece.model",
)  # fmt: skip
_TOKENIZER_FILES = (CONFIG, *_TOKENIZER)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+)?")


def model_folder(model: str) -> str:
    """Return the folder of a model, downloaded from the hub if it is a name there."""
    if os.path.isdir(model):
        return os.path.abspath(model)
    return _from_hub(model, "there is no such folder; pass one that `save_pretrained` wrote, or a hub's org/name")


def weights_file(weights: str) -> str:
    """Return the path of a single file of weights, downloaded from the hub if it is a name there."""
    if not weights.endswith(SUFFIX):
        raise unusable(weights, f"single weights are a {SUFFIX} file; anything else could run code when loaded")
    if os.path.isfile(weights):
        return os.path.abspath(weights)
    return _from_hub(weights, "there is no such file")


def is_on_hub(model: str) -> bool:
    """Return whether a model or single weights would be downloaded: a hub name that is not on this disk."""
    is_here = os.path.isfile(model) if model.endswith(SUFFIX) else os.path.isdir(model)
    return not is_here and _is_hub_name(model)


def tokenizer_of(model: str, tokenizer: str | None) -> str:
    """Return the place of a text encoder's tokenizer: as passed, with its weights, or where pipelines keep it.

    In a pipeline, `text_encoder_2` has its tokenizer in `tokenizer_2`.
    """
    if tokenizer or _there(model_folder(model), _TOKENIZER):
        return tokenizer or model
    above, name = os.path.split(model.rstrip("/"))
    near = os.path.join(above, name.replace("text_encoder", "tokenizer"))
    if name.startswith("text_encoder") and (os.path.isdir(near) or not os.path.isdir(model)):
        return near
    raise unusable(model, "it has no tokenizer", hint="save one into its folder, or pass tokenizer='…'")


def unusable(model: object, problem: str, hint: str = "") -> ModelUnusable:
    return ModelUnusable(f"the model '{model}' cannot be used: {problem}", hint=hint)


def config_of(model: str) -> Mapping[str, Any]:
    """Return the configuration of a model."""
    return _document(model, os.path.join(model_folder(model), CONFIG), "pass the folder that holds the model itself")


def pipeline_index(model: str) -> Mapping[str, Any]:
    """Return the index of a pipeline: its class, and the class of each of its parts."""
    return _of_pipeline(model, PIPELINE)


def scheduler_config(model: str) -> Mapping[str, Any]:
    """Return the configuration of a pipeline's scheduler."""
    return _of_pipeline(model, SCHEDULER)


def _of_pipeline(model: str, name: str) -> Mapping[str, Any]:
    is_here = os.path.isdir(model) or not _is_hub_name(model)
    path = os.path.join(model, name) if is_here else _from_hub(f"{model}/{name}", "")
    return _document(model, path, "pass the folder of a whole pipeline")


def _document(model: str, path: str, advice: str) -> Mapping[str, Any]:
    name = os.path.basename(path)
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise unusable(model, f"it has no {name}", hint=advice) from error
    except ValueError as error:
        raise unusable(model, f"its {name} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise unusable(model, f"its {name} is not a JSON object")
    return document


def setting(model: str, name: str, default: Any = None) -> Any:
    """Return one value of a model's configuration."""
    value = config_of(model).get(name, default)
    if value is None:
        raise unusable(model, f"its {CONFIG} has no '{name}'; it is another kind of model")
    return value


def hashes(name: str, model: str, weights: str | None = None, tokenizer: str | None = None) -> dict[str, str]:
    """Return the hashes of the files that a model's outputs depend on: `name/file` -> SHA-256."""
    folder = model_folder(model)
    config_of(model)  # raises for a folder that is not a model, before its weights are hashed
    files = (
        [os.path.join(folder, CONFIG)] if weights else [*_weights_in(model, folder), *_there(folder, _TOKENIZER_FILES)]
    )
    files += [weights_file(weights)] if weights else []
    digests = {f"{name}/{os.path.basename(path)}": file_hash(path) for path in dict.fromkeys(files)}
    apart = _there(model_folder(tokenizer), _TOKENIZER_FILES) if tokenizer and (weights or tokenizer != model) else []
    return digests | {f"{name}/tokenizer/{os.path.basename(path)}": file_hash(path) for path in apart}


def file_hash(path: str) -> str:
    """Return the SHA-256 of a file; it is hashed again only after it changed."""
    status = os.stat(path)
    return _hashed(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@lru_cache(maxsize=256)
def _hashed(path: str, size: int, mtime_ns: int, ctime_ns: int, inode: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights_in(model: str, folder: str) -> list[str]:
    """Return the files that a library may read to load the folder: a whole one, or an index and its shards."""
    weights = _there(folder, tuple(f"{stem}{SUFFIX}" for stem in _STEMS))
    for index in _there(folder, tuple(f"{stem}{INDEX}" for stem in _STEMS)):
        weights += [index, *_shards(model, folder, index)]
    if weights:
        return weights
    names = sorted(os.listdir(folder))
    variants = [name for name in names if name.endswith(SUFFIX)]
    if variants:
        raise unusable(
            model,
            f"its weights have another name, '{variants[0]}': "
            f"expected '{_STEMS[0]}{SUFFIX}', '{_STEMS[1]}{SUFFIX}' or an index of shards",
            hint="link or rename the file to that, or save the model without variant=",
        )
    there = ", ".join(names[:6]) or "nothing"
    raise unusable(
        model,
        f"it has no {SUFFIX} weights (found: {there})",
        hint="save it with safe_serialization: pickle files are never loaded",
    )


def _shards(model: str, folder: str, index: str) -> Iterator[str]:
    try:
        with open(index, encoding="utf-8") as file:
            names = sorted({str(name) for name in json.load(file)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unusable(model, f"its {os.path.basename(index)} names no weights", hint="save the model again") from error
    for name in names:
        path = os.path.join(folder, os.path.basename(name))
        if not os.path.isfile(path):
            raise unusable(model, f"its weights lack the file '{name}' that {os.path.basename(index)} names")
        yield path


def _there(folder: str, names: tuple[str, ...]) -> list[str]:
    return [path for name in names if os.path.isfile(path := os.path.join(folder, name))]


def _is_hub_name(name: str) -> bool:
    return not name.startswith((".", "/", "~")) and _HUB_NAME.fullmatch(name) is not None


@lru_cache(maxsize=32)
def _from_hub(name: str, problem: str) -> str:
    """Return the local copy of a hub name. Cached, so that a build does not change its model half way."""
    if not _is_hub_name(name):
        raise unusable(name, problem)
    organization, repository, *path = name.split("/", 2)
    hub: Any = import_module("forebay.hub")  # only a name on the hub needs its library
    try:
        inner = path[0] if path else ""
        local: str = hub.model_files(f"{organization}/{repository}", inner, (SUFFIX, INDEX, *_TOKENIZER_FILES))
    except (SourceNotFound, StoreUnavailable) as error:
        raise unusable(name, f"nothing of that name is on this disk, and {error.message}", hint=error.hint) from error
    return local
