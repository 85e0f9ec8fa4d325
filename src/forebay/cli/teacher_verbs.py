"""`forebay build teachers CACHE` and `forebay estimate teachers CACHE`: add layers to an existing cache.

A teacher layer is computed from the rows of a cache. So the cache takes the place of the source, and every teacher is
an option whose value is its model.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec
import numpy as np

from forebay import api
from forebay.cache.catalog import layers_of, read_cache_document, read_recipe_document
from forebay.cli.settings import BuildSettings, engine_of, place_in_plan
from forebay.cli.verb import (
    Decorator,
    Finding,
    cache_argument,
    checked_range,
    decorated,
    field_option,
    passed_flags,
    shown_progress,
    source_option,
    struct_options,
    verb,
)
from forebay.errors import CacheNotFound
from forebay.fields import declared
from forebay.preview.words import human_bytes
from forebay.read.cache import open_cache
from forebay.recipe import RecipeDocument, input_layers
from forebay.store import open_store
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
from forebay.teachers.align import interpolation_errors, reopened

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
    click.option(
        "--pipeline",
        metavar="MODEL",
        help="Folder of a whole pipeline: all its layers (SD1.5, SDXL, SD3, Flux, DiT).",
    ),
    click.option(
        "--only",
        multiple=True,
        metavar="LAYER",
        help="Build this layer of the pipeline, and no other that is not named (repeatable).",
    ),
    click.option("--labels", metavar="COLUMN", help="Class numbers for a DiT: a column, or COLUMN.KEY of its JSON."),
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
    click.option(
        "--name",
        "names",
        multiple=True,
        metavar="TEACHER=LAYER",
        help="Name of a teacher's layer and columns, e.g. lune=lune_v2 (repeatable).",
    ),
)


def teacher_recipes(root: str, flags: Mapping[str, Any]) -> dict[str, TeacherRecipe]:
    """The recipes of the layers that flags name, in build order; without any, of all unfinished layers."""
    is_allowed = bool(flags.get("check_source"))
    given = {name: value for name, value in flags.items() if name not in ("check_source", "names")}
    names = _layer_names(flags.get("names", ()))
    if "pipeline" not in given and (alone := {"only", "labels"} & given.keys()):
        raise click.UsageError(f"--{min(alone)} needs --pipeline.")
    if not any(name in given for name in (*_MODELS, "pipeline")):
        return _begun(root, given, is_allowed)
    base = _base(root)
    fields = {**_base_prompts(base), **{name: given[name] for name in _COMMON if name in given}}
    images = {name: base.fields[name] for name in ("size", "pad_color", "storage")} if base.kind == "images" else {}
    if "pipeline" in given:
        return _of_pipeline(given, images, fields, names)
    if "vae" in given and not images:
        raise click.UsageError(f"--vae needs images, but '{root}' has {base.kind}.")
    options = {
        name: given[name]
        for name in ("vae", "t5", "clip", "sample", "max_length", "ragged", "projected")
        if name in given
    }
    timed = {**fields, **({"buckets": given["buckets"]} if "buckets" in given else {})}
    made = [(recipe.model, fields) for recipe in encodings(**options, **images, **fields).values()]
    made += [(teacher, timed) for teacher in _listeners(given)]
    named = [(_named(teacher, names), how) for teacher, how in made]
    return {teacher.layer_name(): TeacherRecipe(teacher=teacher, **how) for teacher, how in named}


def _of_pipeline(
    given: Mapping[str, Any], images: Mapping[str, Any], fields: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, TeacherRecipe]:
    """The recipes of a pipeline's layers, or of those that --only names."""
    others = ("vae", "t5", "clip", "lune", "sol", "sol_weights", "ragged", "projected")
    if clash := [name for name in others if name in given] + ["name"] * bool(names):
        raise click.UsageError(f"--{clash[0].replace('_', '-')} and --pipeline: use two commands.")
    more = {name: given[name] for name in ("sample", "max_length", "noise", "labels", "buckets") if name in given}
    denoiser = {name: given[name] for name in ("time_direction", "noise_per") if name in given}
    denoiser |= {"weights": given["lune_weights"]} if "lune_weights" in given else {}
    recipes = pipeline(given["pipeline"], **images, **more, denoiser=denoiser, **fields)
    if unknown := set(given.get("only", ())) - recipes.keys():
        raise click.UsageError(f"--only {min(unknown)}: the pipeline has {', '.join(recipes)}.")
    return {layer: recipe for layer, recipe in recipes.items() if layer in given.get("only", recipes)}


def _layer_names(pairs: Sequence[str]) -> dict[str, str]:
    """The layer of each teacher that --name names."""
    found = dict(pair.partition("=")[::2] for pair in pairs)
    wrong = [name for name, layer in found.items() if name not in _MODELS or not layer]
    if wrong:
        raise click.UsageError(
            f"--name must be TEACHER=LAYER, with a teacher of {', '.join(_MODELS)} (got {wrong[0]})."
        )
    return found


def _named(teacher: Teacher, names: Mapping[str, str]) -> Teacher:
    """A teacher whose layer and columns have the name passed for it, and which reads the text and latents so named."""
    option = "vae" if isinstance(teacher, Latents) else teacher.tag().removeprefix("geometric-")
    changes = {"name": names[option]} if option in names else {}
    if isinstance(teacher, Lune | Sol):
        changes |= {"text": f"{names['clip']}_states"} if "clip" in names else {}
        changes |= {"latents": names["vae"]} if "vae" in names else {}
    return msgspec.structs.replace(teacher, **changes)


def _listeners(given: Mapping[str, Any]) -> list[Teacher]:
    how = {name: given[name] for name in ("noise", "time_direction", "noise_per") if name in given}
    found: list[Teacher] = []
    if "lune" in given:
        found.append(Lune(unet=given["lune"], weights=given.get("lune_weights"), **how))
    if given.get("sol") == GEOMETRIC:
        found.append(GeometricSol())
    elif "sol" in given:
        found.append(Sol(unet=given["sol"], weights=given.get("sol_weights"), **how))
    return found


def _begun(root: str, given: Mapping[str, Any], is_allowed: bool) -> dict[str, TeacherRecipe]:
    """The teacher layers of a cache, each after those it reads."""
    how = {name: value for name, value in given.items() if name in _HOW}
    if given.keys() - set(_HOW):
        names = ", ".join(f"--{name}" for name in _MODELS)
        raise click.UsageError(
            f"Name at least one teacher ({names}) or --pipeline, or pass no options to resume the existing layers."
        )
    store = open_store(root)
    read_cache_document(store)
    documents = {layer: read_recipe_document(store, layer) for layer in layers_of(store)}
    kept = {layer: one for layer, one in documents.items() if one is not None and one.kind == TeacherRecipe.kind}
    if not kept:
        raise click.UsageError(f"'{root}' has no teacher layer; name one, e.g. --t5 google/flan-t5-base.")
    ordered = sorted(kept, key=lambda name: (_height(kept, name), name))
    verb = f"{click.get_current_context().command_path.split()[1]} teachers"
    found = {layer: reopened(kept[layer], root, verb, is_allowed) for layer in ordered}
    return {layer: msgspec.structs.replace(recipe, **how) for layer, recipe in found.items()}


def _height(kept: Mapping[str, RecipeDocument], layer: str) -> int:
    below = [name for name in input_layers(kept[layer]) if name in kept]
    return 1 + max((_height(kept, name) for name in below), default=0)


def _base(root: str) -> RecipeDocument:
    store = open_store(root)
    base = read_recipe_document(store, read_cache_document(store).base)
    if base is None:
        raise CacheNotFound(root)
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
    options["begin_at"] = place_in_plan(os.environ)
    with checked_range(options.get("start_chunk"), options.get("end_chunk")):
        recipes = teacher_recipes(cache, passed)
        if unknown := set(replace) - recipes.keys():
            raise click.UsageError(f"--replace {min(unknown)}: this command builds {', '.join(recipes)}.")
        if dry_run:
            return _estimated(cache, recipes, None)
        with shown_progress() as on_progress:
            return api.build_layers(cache, recipes, replace=replace, on_progress=on_progress, **options)


def _estimate(cache: str, rows: int | None, held_out: int, **flags: Any) -> Any:
    """Estimate the size of teacher layers from the shapes of the models.

    Loads nothing, except with --held-out. Assumes that all prompts differ, although equal prompts are stored once.
    Exits 1 if the disk of the cache is too small.

    Example: forebay estimate teachers caches/art --lune sd/unet --rows 10000
    """
    recipes = teacher_recipes(cache, passed_flags(flags))
    found = _estimated(cache, recipes, rows)
    found = msgspec.structs.replace(found, notes=(*found.notes, *_held_out(cache, recipes, held_out)))
    if found.fits:
        return found
    if found.free_bytes is None or found.bytes <= found.free_bytes:
        return Finding(found, "ChunkTooLarge", found.notes[0], is_said=True)
    needed, free = human_bytes(found.bytes), human_bytes(found.free_bytes or 0)
    problem = (
        f"not enough disk space at '{cache}': about {needed} are needed, {free} are free; free some or use another disk"
    )
    return Finding(found, "DiskFull", problem, is_said=True)


def _held_out(cache: str, recipes: Mapping[str, TeacherRecipe], most: int) -> Iterator[str]:
    """Run the timed teachers on some rows at and between their buckets, and yield the errors."""
    opened = open_cache(cache)
    for layer, recipe in recipes.items():
        if most and recipe.model.timed:
            try:
                yield from map(str, interpolation_errors(layer, recipe, opened, most))
            finally:
                recipe.release()


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
        source_option,
        click.option(
            "--replace",
            multiple=True,
            metavar="LAYER",
            help="Replace this layer if another model or other options made it (repeatable).",
        ),
        click.option("-n", "--dry-run", is_flag=True, help="Show what would be stored; load and write nothing."),
    )
)
estimate_teachers_command = verb("teachers")(
    decorated(
        _estimate,
        cache_argument,
        *TEACHER_OPTIONS,
        click.option("--rows", type=click.IntRange(min=1), help="Number of rows.  [default: those of the cache]"),
        click.option(
            "--held-out",
            type=click.IntRange(min=0),
            default=0,
            metavar="ROWS",
            help="Run timed teachers on this many rows halfway between buckets: the error of interpolation.",
        ),
        source_option,
    )
)
