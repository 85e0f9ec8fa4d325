"""`forebay build teachers CACHE` and `forebay estimate teachers CACHE`: add layers to an existing cache.

A teacher layer is computed from the rows of a cache. So the cache takes the place of the source, and every teacher is
an option whose value is its model.
"""

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from forebay import api
from forebay.cache.catalog import layers_of, read_cache_document, read_recipe_document
from forebay.cli.options import (
    Decorator,
    SizeType,
    cache_argument,
    complete_file,
    decorated,
    failures_option,
    json_option,
    source_option,
)
from forebay.cli.progress import shown_progress
from forebay.cli.show import say_error, show
from forebay.errors import CacheNotFound
from forebay.preview.words import human_bytes
from forebay.read.cache import open_cache
from forebay.recipe import RecipeDocument, input_layers
from forebay.store import open_store
from forebay.teachers import (
    GeometricSol,
    Lune,
    Sol,
    Teacher,
    TeacherEstimate,
    TeacherRecipe,
    encodings,
    estimate_teachers,
)
from forebay.teachers.align import reopened

GEOMETRIC = "geometric"
CAPTION = "caption"
_MODELS = ("vae", "t5", "clip", "lune", "sol")
_HOW = {"device", "memory_limit"}  # how a layer is made, not what it is
_COMMON = (
    "batch_size", "batch_timesteps", "dtype", "stored", "seed", "device", "memory_limit", "prompt_column", "prompt_key",
)  # fmt: skip
TEACHER_OPTIONS: tuple[Decorator, ...] = (
    click.option("--vae", metavar="MODEL", shell_complete=complete_file, help="VAE for latents of images."),
    click.option(
        "--t5", metavar="MODEL", shell_complete=complete_file, help="T5 encoder for hidden states of prompts."
    ),
    click.option(
        "--clip", metavar="MODEL", shell_complete=complete_file, help="CLIP text encoder for hidden states of prompts."
    ),
    click.option(
        "--lune",
        metavar="MODEL",
        shell_complete=complete_file,
        help="UNet for mid-block features at every bucket; needs the layer of --clip.",
    ),
    click.option(
        "--sol",
        metavar="MODEL",
        shell_complete=complete_file,
        help=f"UNet for self-attention statistics, or '{GEOMETRIC}' for the closed form.",
    ),
    click.option(
        "--lune-weights",
        metavar="FILE",
        shell_complete=complete_file,
        help="Fine-tuned .safetensors weights for the UNet of --lune.",
    ),
    click.option(
        "--sol-weights",
        metavar="FILE",
        shell_complete=complete_file,
        help="Fine-tuned .safetensors weights for the UNet of --sol.",
    ),
    click.option("--noise", type=click.Choice(["pure", "noised"]), help="Input of the UNet.  [recipe; pure]"),
    click.option(
        "--time-direction",
        type=click.Choice(["t0_noise", "t0_data"]),
        help="End of t that is noise, with --noise noised.  [recipe; t0_noise]",
    ),
    click.option(
        "--sample",
        type=click.Choice(["mean", "seeded"]),
        help="VAE posterior: its mean, or a seeded sample.  [recipe; mean]",
    ),
    click.option("--max-length", type=click.IntRange(min=1), help="Tokens per prompt, for T5.  [recipe; 128]"),
    click.option(
        "--bucket",
        "buckets",
        type=float,
        multiple=True,
        help="Timestep in [0, 1] (repeatable).  [recipe; .05 .15 … .95]",
    ),
    click.option("--batch-size", type=click.IntRange(min=1), help="Samples per forward pass.  [recipe; 8]"),
    click.option(
        "--batch-timesteps/--single-timesteps",
        default=None,
        help="Run all buckets in one forward pass.  [recipe; single]",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "float16", "bfloat16"]),
        help="Compute dtype.  [recipe; float32]",
    ),
    click.option(
        "--stored", type=click.Choice(["float32", "float16", "bfloat16"]), help="Storage dtype.  [recipe; float16]"
    ),
    click.option("--seed", type=int, help="Random seed for all noise.  [recipe; 0]"),
    click.option("--prompt-column", metavar="COLUMN", help="Column with the prompts.  [recipe; by the base layer]"),
    click.option(
        "--prompt-key", metavar="KEY", help=f"Key of the prompt, if a row is JSON.  [recipe; images: {CAPTION}]"
    ),
    click.option("--device", help="Device for the models: cpu, cuda, cuda:1, mps.  [auto]"),
    click.option("--memory-limit", type=SizeType(), help="Memory limit of a forward pass; batches are halved to fit."),
)


def teacher_recipes(root: str, flags: Mapping[str, Any]) -> dict[str, TeacherRecipe]:
    """The recipes of the layers that flags name, in build order; without any, of all unfinished layers."""
    is_allowed = bool(flags.get("check_source"))
    passed = {name: value for name, value in flags.items() if name != "check_source"}
    given = {name: value for name, value in passed.items() if value is not None and value != ()}
    if not any(name in given for name in _MODELS):
        return _begun(root, given, is_allowed)
    base = _base(root)
    fields = {**_base_prompts(base), **{name: given[name] for name in _COMMON if name in given}}
    images = {name: base.fields[name] for name in ("size", "pad_color", "storage")} if base.kind == "images" else {}
    if "vae" in given and not images:
        raise click.UsageError(f"--vae needs images, but '{root}' has {base.kind}.")
    options = {name: given[name] for name in ("vae", "t5", "clip", "sample", "max_length") if name in given}
    timed = {**fields, **({"buckets": given["buckets"]} if "buckets" in given else {})}
    found = encodings(**options, **images, **fields)
    found |= {teacher.layer_name(): TeacherRecipe(teacher=teacher, **timed) for teacher in _listeners(given)}
    return found


def _listeners(given: Mapping[str, Any]) -> list[Teacher]:
    how = {name: given[name] for name in ("noise", "time_direction") if name in given}
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
    if given.keys() - _HOW:
        names = ", ".join(f"--{name}" for name in _MODELS)
        raise click.UsageError(
            f"Name at least one teacher ({names}), or pass no options to resume the existing layers."
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


RUN_OPTIONS = (
    click.option("--start-chunk", type=click.IntRange(min=0), metavar="A", help="First chunk to build."),
    click.option("--end-chunk", type=click.IntRange(min=0), metavar="B", help="Last chunk to build, inclusive."),
    click.option(
        "--mode",
        type=click.Choice(["forward", "inverse"]),
        default="forward",
        help="inverse: check existing chunks first, then fill gaps from the end.",
    ),
    failures_option,
    source_option,
    click.option("--dry-run", is_flag=True, help="Show what would be stored; load and write nothing."),
    json_option,
)
_BUILD_TERMS = ("start_chunk", "end_chunk", "mode", "max_failures")


def _build(cache: str, dry_run: bool, as_json: bool, **flags: Any) -> None:
    """Add teacher features to a cache, as layers.

    CACHE is a cache of images or of prompts (raw lines). MODEL is a folder written by save_pretrained, or org/name on
    the hub. One model is in memory at a time. Complete layers are skipped; without any model, all unfinished teacher
    layers are resumed.

    Example: forebay build teachers caches/art --clip sd/text_encoder --lune sd/unet
    """
    terms = {name: flags.pop(name) for name in _BUILD_TERMS}
    recipes = teacher_recipes(cache, flags)
    if dry_run:
        show(_estimated(cache, recipes, None), as_json)
        return
    with shown_progress(as_json) as on_progress:
        reports = api.build_layers(cache, recipes, on_progress=on_progress, **terms)
    show(reports, as_json)


def _estimate(cache: str, rows: int | None, as_json: bool, **flags: Any) -> None:
    """Estimate the size of teacher layers from the shapes of the models.

    Loads nothing. Assumes that all prompts differ, although equal prompts are stored once. Exits 1 if the disk of the
    cache is too small.

    Example: forebay estimate teachers caches/art --lune sd/unet --rows 10000
    """
    found = _estimated(cache, teacher_recipes(cache, flags), rows)
    show(found, as_json)
    if not found.fits:
        needed, free = human_bytes(found.bytes), human_bytes(found.free_bytes or 0)
        say_error(
            f"not enough disk space at '{cache}': about {needed} are needed, {free} are free; free some or use another "
            f"disk"
        )
        click.get_current_context().exit(1)


def _estimated(cache: str, recipes: Any, rows: int | None) -> TeacherEstimate:
    count = len(open_cache(cache)) if rows is None else rows
    return estimate_teachers(recipes, count, free_bytes=open_store(cache).free_bytes())


build_teachers = click.command("teachers")(decorated(_build, cache_argument, *TEACHER_OPTIONS, *RUN_OPTIONS))
estimate_command = click.command("teachers")(
    decorated(
        _estimate,
        cache_argument,
        *TEACHER_OPTIONS,
        click.option("--rows", type=click.IntRange(min=1), help="Number of rows.  [default: those of the cache]"),
        source_option,
        json_option,
    )
)
