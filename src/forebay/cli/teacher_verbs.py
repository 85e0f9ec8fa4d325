"""`forebay build teachers CACHE` and `forebay estimate teachers CACHE`: add layers to an existing cache.

A teacher layer is computed from the rows of a cache. So the cache takes the place of the source, and every teacher is
an option whose value is its model.
"""

from collections.abc import Mapping
from typing import Any

import click
import msgspec
import numpy as np

from forebay import api
from forebay.cache.state import Index
from forebay.cli.build_verbs import no_room
from forebay.cli.options import (
    Decorator,
    WrongUsage,
    cache_argument,
    checked_range,
    decorated,
    field_option,
    network_option,
    option,
    passed_flags,
    struct_options,
    whole,
)
from forebay.cli.output import Finding, shown_progress
from forebay.cli.settings import BuildSettings, engine_of
from forebay.cli.verb import verb
from forebay.fields import declared
from forebay.read.opening import open_cache
from forebay.recipe import RecipeDocument
from forebay.store import open_store
from forebay.store.base import cache_not_found
from forebay.teachers import (
    T5,
    Clip,
    GeometricSol,
    Latents,
    Lune,
    Sol,
    Teacher,
    TeacherEstimate,
    TeacherRecipe,
    encodings,
    estimate_teachers,
    pipeline,
)
from forebay.teachers.align import reopened

GEOMETRIC = "geometric"
CAPTION = "caption"
_MODELS = ("vae", "t5", "clip", "lune", "sol")
_HOW = ("device", "memory_limit")  # how a layer is made, not what it is
_FIELDS = (
    "batch_size", "batch_timesteps", "dtype", "stored", "seed", "prompt_column", "prompt_key", "empty_prompt",
)  # fmt: skip
_COMMON = (*_FIELDS, *_HOW)
_LATENTS, _T5, _CLIP, _UNET, _RECIPE = map(declared, (Latents, T5, Clip, Lune, TeacherRecipe))
_GROUP = "Teachers"
TEACHER_OPTIONS: tuple[Decorator, ...] = (
    option(
        "--pipeline", metavar="MODEL", help="Folder of a whole pipeline: all its layers (SD1.5, SDXL, SD3, Flux, DiT)."
    ),
    option(
        "--only",
        multiple=True,
        metavar="LAYER",
        help="Build only this layer of the pipeline (repeatable).",
    ),
    option("--labels", metavar="COLUMN", help="Class numbers for a DiT: a column, or COLUMN.KEY of its JSON."),
    field_option(_LATENTS["vae"], _GROUP),
    field_option(_T5["model"], _GROUP, "--t5", param="t5"),
    field_option(_CLIP["model"], _GROUP, "--clip", param="clip"),
    field_option(
        _UNET["unet"],
        _GROUP,
        "--lune",
        param="lune",
        help="UNet whose mid-block features, at every bucket, are the layer lune; needs the layer of --clip. For other "
        "models, use --pipeline.",
    ),
    field_option(
        _UNET["unet"],
        _GROUP,
        "--sol",
        param="sol",
        help=f"UNet whose self-attention statistics are the layer sol, or '{GEOMETRIC}' for the closed form.",
    ),
    *(field_option(_UNET["weights"], _GROUP, f"--{name}-weights", param=f"{name}_weights") for name in ("lune", "sol")),
    field_option(_UNET["noise"], "Layer"),
    field_option(_UNET["time_direction"], "Layer"),
    field_option(_UNET["noise_per"], "Layer"),
    field_option(_LATENTS["sample"], "Layer"),
    field_option(_T5["max_length"], "Layer"),
    field_option(_T5["ragged"], "Layer"),
    field_option(_CLIP["projected"], "Layer"),
    *(field_option(_RECIPE[name], "Layer") for name in ("buckets", *_FIELDS)),
    *(field_option(_RECIPE[name], "Build") for name in _HOW),
)


def teacher_recipes(root: str, flags: Mapping[str, Any]) -> dict[str, TeacherRecipe]:
    """The recipes of the layers that flags name, in build order; without any, of all unfinished layers."""
    is_allowed = bool(flags.get("allow_network"))
    passed = {name: value for name, value in flags.items() if name != "allow_network"}
    if "pipeline" not in passed and (alone := {"only", "labels"} & passed.keys()):
        raise WrongUsage(f"--{min(alone)} needs --pipeline")
    if not any(name in passed for name in (*_MODELS, "pipeline")):
        return _begun(root, passed, is_allowed)
    base = _base(root)
    fields = {**_base_prompts(base), **{name: passed[name] for name in _COMMON if name in passed}}
    images = {name: base.fields[name] for name in ("size", "pad_color", "storage")} if base.kind == "images" else {}
    if "pipeline" in passed:
        return _of_pipeline(passed, images, fields)
    if "vae" in passed and not images:
        raise WrongUsage(f"--vae needs images, but '{root}' has {base.kind}")
    options = {
        name: passed[name]
        for name in ("vae", "t5", "clip", "sample", "max_length", "ragged", "projected")
        if name in passed
    }
    timed = {**fields, **({"buckets": passed["buckets"]} if "buckets" in passed else {})}
    recipes = encodings(**options, **images, **fields)
    return recipes | {
        teacher.layer_name(): TeacherRecipe(teacher=teacher, **timed) for teacher in _timed_teachers(passed)
    }


def _of_pipeline(
    passed: Mapping[str, Any], images: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, TeacherRecipe]:
    """The recipes of a pipeline's layers, or of those that --only names."""
    others = ("vae", "t5", "clip", "lune", "sol", "sol_weights", "ragged", "projected")
    if clash := [name for name in others if name in passed]:
        raise WrongUsage(f"--{clash[0].replace('_', '-')} and --pipeline exclude each other", "use two commands")
    more = {name: passed[name] for name in ("sample", "max_length", "noise", "labels", "buckets") if name in passed}
    denoiser = {name: passed[name] for name in ("time_direction", "noise_per") if name in passed}
    denoiser |= {"weights": passed["lune_weights"]} if "lune_weights" in passed else {}
    recipes = pipeline(passed["pipeline"], **images, **more, denoiser=denoiser, **fields)
    if unknown := set(passed.get("only", ())) - recipes.keys():
        raise WrongUsage(
            f"the pipeline has no layer '{min(unknown)}'", f"pass --only with one of: {', '.join(recipes)}"
        )
    return {layer: recipe for layer, recipe in recipes.items() if layer in passed.get("only", recipes)}


def _timed_teachers(passed: Mapping[str, Any]) -> list[Teacher]:
    how = {name: passed[name] for name in ("noise", "time_direction", "noise_per") if name in passed}
    teachers: list[Teacher] = []
    if "lune" in passed:
        teachers.append(Lune(unet=passed["lune"], weights=passed.get("lune_weights"), **how))
    if passed.get("sol") == GEOMETRIC:
        teachers.append(GeometricSol())
    elif "sol" in passed:
        teachers.append(Sol(unet=passed["sol"], weights=passed.get("sol_weights"), **how))
    return teachers


def _begun(root: str, passed: Mapping[str, Any], is_allowed: bool) -> dict[str, TeacherRecipe]:
    """The teacher layers of a cache, each after those it reads."""
    how = {name: value for name, value in passed.items() if name in _HOW}
    if passed.keys() - set(_HOW):
        names = ", ".join(f"--{name}" for name in _MODELS)
        raise WrongUsage(f"missing a teacher ({names}) or --pipeline", "pass no options to resume the existing layers")
    index = Index.take(open_store(root))
    documents = {layer: index.recipe(layer) for layer in index.layers}
    stored = {layer: one for layer, one in documents.items() if one is not None and one.kind == TeacherRecipe.kind}
    if not stored:
        raise WrongUsage(f"'{root}' has no teacher layer", "add one, for instance --t5 google/flan-t5-base")
    ordered = sorted(stored, key=lambda layer: (index.height(layer), layer))
    verb = f"{click.get_current_context().command_path.split()[1]} teachers"
    recipes = {layer: reopened(stored[layer], root, verb, is_allowed) for layer in ordered}
    return {layer: msgspec.structs.replace(recipe, **how) for layer, recipe in recipes.items()}


def _base(root: str) -> RecipeDocument:
    index = Index.take(open_store(root))
    base = index.recipe(index.base)
    if base is None:
        raise cache_not_found(root)
    return base


def _base_prompts(base: RecipeDocument) -> dict[str, Any]:
    return {"prompt_column": "metadata", "prompt_key": CAPTION} if base.kind == "images" else {}


_BUILD_OPTIONS = ("start_chunk", "end_chunk", "mode", "max_failures")
_ENGINE = ("engine", "address", "num_cpus", "num_gpus")


def _build(cache: str, dry_run: bool, replace: tuple[str, ...], **flags: Any) -> Any:
    """Add teacher features to a cache, as layers.

    CACHE is a cache of images or of prompts (raw lines). MODEL is a folder written by save_pretrained, or org/name on
    the hub. One model is in memory at a time. Complete layers are skipped; without any model, all unfinished teacher
    layers are resumed.

    \b
    Example: forebay build teachers caches/art --clip sd/text_encoder --lune sd/unet
             forebay build teachers caches/art --lune better/unet --replace lune
             forebay build teachers caches/art --pipeline flux --noise noised --dtype bfloat16
    """
    passed = passed_flags(flags)
    options = {name: passed.pop(name) for name in _BUILD_OPTIONS if name in passed}
    if engine := {name: passed.pop(name) for name in _ENGINE if name in passed}:
        options["engine"] = engine_of(BuildSettings(**engine))
    with checked_range(options.get("start_chunk"), options.get("end_chunk")):
        recipes = teacher_recipes(cache, passed)
        if unknown := set(replace) - recipes.keys():
            raise WrongUsage(
                f"this command does not build '{min(unknown)}'", f"pass --replace with one of: {', '.join(recipes)}"
            )
        if dry_run:
            return _estimated(cache, recipes, None)
        with shown_progress() as on_progress:
            return api.build_layers(cache, recipes, replace=replace, on_progress=on_progress, **options)


def _estimate(cache: str, rows: int | None, **flags: Any) -> Any:
    """Estimate the size of teacher layers from the shapes of the models.

    Loads nothing. Assumes that all prompts differ, although equal prompts are stored once.
    Exits 1 if the disk of the cache is too small.

    Example: forebay estimate teachers caches/art --lune sd/unet --rows 10000
    """
    recipes = teacher_recipes(cache, passed_flags(flags))
    report = _estimated(cache, recipes, rows)
    if report.fits:
        return report
    if report.free_bytes is None or report.bytes <= report.free_bytes:
        return Finding(report, "ChunkTooLarge", report.notes[0], prints_error=True)
    problem = no_room(cache, report.bytes, report.free_bytes)
    return Finding(report, "StoreFull", problem, prints_error=True)


def _estimated(cache: str, recipes: Any, rows: int | None) -> TeacherEstimate:
    opened = open_cache(cache)
    count = len(opened) if rows is None else rows
    largest = int(np.diff(opened.chunk_starts).max(initial=0))
    return estimate_teachers(recipes, count, free_bytes=open_store(cache).free_bytes(), chunk_rows=largest)


build_teachers = verb("teachers")(
    decorated(
        _build,
        cache_argument,
        *TEACHER_OPTIONS,
        *struct_options(BuildSettings, "Build", *_BUILD_OPTIONS, *_ENGINE),
        network_option,
        option(
            "--replace",
            multiple=True,
            metavar="LAYER",
            help="Replace this layer if another model or other options made it (repeatable).",
        ),
        option("-n", "--dry-run", is_flag=True, help="Show what would be stored; load and write nothing."),
    )
)
estimate_teachers_command = verb("teachers")(
    decorated(
        _estimate,
        cache_argument,
        *TEACHER_OPTIONS,
        option("--rows", type=whole(1), help="Number of rows.  [default: those of the cache]"),
        network_option,
    )
)
