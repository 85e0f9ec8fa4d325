"""The options that name teachers, and the recipes that they mean on a cache that is there."""

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from forebay.cache.publish import layers_of, read_cache_document, read_recipe_document
from forebay.cli.options import Decorator, complete_file
from forebay.cli.sizes import SizeType
from forebay.errors import CacheNotFound
from forebay.recipe import RecipeDocument, input_layers
from forebay.store import open_store
from forebay.teachers import GeometricSol, Lune, Sol, Teacher, TeacherRecipe, encodings
from forebay.teachers.align import reopened

GEOMETRIC = "geometric"
CAPTION = "caption"
_MODELS = ("vae", "t5", "clip", "lune", "sol")
_HOW = {"device", "memory_limit"}  # how a layer is made, not what it is
_COMMON = (
    "batch_size", "batch_timesteps", "dtype", "stored", "seed", "device", "memory_limit", "prompt_column", "prompt_key",
)  # fmt: skip

TEACHER_OPTIONS: tuple[Decorator, ...] = (
    click.option("--vae", metavar="MODEL", shell_complete=complete_file, help="Latents of images, by this VAE."),
    click.option("--t5", metavar="MODEL", shell_complete=complete_file, help="States of prompts, by this T5 encoder."),
    click.option(
        "--clip", metavar="MODEL", shell_complete=complete_file, help="States of prompts, by this CLIP text encoder."
    ),
    click.option(
        "--lune",
        metavar="MODEL",
        shell_complete=complete_file,
        help="The middle of this UNet at every bucket; needs --clip's layer.",
    ),
    click.option(
        "--sol",
        metavar="MODEL",
        shell_complete=complete_file,
        help=f"The self-attention of this UNet, or '{GEOMETRIC}': the closed form.",
    ),
    click.option(
        "--lune-weights",
        metavar="FILE",
        shell_complete=complete_file,
        help="Fine-tuned .safetensors over the UNet of --lune.",
    ),
    click.option(
        "--sol-weights",
        metavar="FILE",
        shell_complete=complete_file,
        help="Fine-tuned .safetensors over the UNet of --sol.",
    ),
    click.option("--noise", type=click.Choice(["pure", "noised"]), help="Input of the UNet.  [recipe; pure]"),
    click.option(
        "--time-direction",
        type=click.Choice(["t0_noise", "t0_data"]),
        help="Which end of t is noise, where latents are noised.  [recipe; t0_noise]",
    ),
    click.option("--sample", type=click.Choice(["mean", "seeded"]), help="Of the VAE's posterior.  [recipe; mean]"),
    click.option("--max-length", type=click.IntRange(min=1), help="Tokens of a prompt, for T5.  [recipe; 128]"),
    click.option("--bucket", "buckets", type=float, multiple=True, help="A moment; repeat.  [recipe; .05 .15 … .95]"),
    click.option("--batch-size", type=click.IntRange(min=1), help="Samples in a forward.  [recipe; 8]"),
    click.option(
        "--batch-timesteps/--single-timesteps", default=None, help="All buckets in one forward.  [recipe; single]"
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "float16", "bfloat16"]),
        help="Models compute in it.  [recipe; float32]",
    ),
    click.option(
        "--stored", type=click.Choice(["float32", "float16", "bfloat16"]), help="What is stored.  [recipe; float16]"
    ),
    click.option("--seed", type=int, help="Of all noise.  [recipe; 0]"),
    click.option("--prompt-column", metavar="COLUMN", help="Where prompts are.  [recipe; by the base layer]"),
    click.option("--prompt-key", metavar="KEY", help=f"Their key, where a row is JSON.  [recipe; images: {CAPTION}]"),
    click.option("--device", help="Where models run: cpu, cuda, cuda:1, mps.  [auto]"),
    click.option("--memory-limit", type=SizeType(), help="Most memory of a forward: batches are halved until it fits."),
)


def teacher_recipes(root: str, flags: Mapping[str, Any]) -> dict[str, TeacherRecipe]:
    """The layers that flags name, in the order in which they can be built; without any, those that were begun."""
    is_allowed = bool(flags.get("check_source"))
    passed = {name: value for name, value in flags.items() if name != "check_source"}
    given = {name: value for name, value in passed.items() if value is not None and value != ()}
    if not any(name in given for name in _MODELS):
        return _begun(root, given, is_allowed)
    base = _base(root)
    fields = {**_base_prompts(base), **{name: given[name] for name in _COMMON if name in given}}
    images = {name: base.fields[name] for name in ("size", "pad_color", "storage")} if base.kind == "images" else {}
    if "vae" in given and not images:
        raise click.UsageError(f"--vae makes latents of images, and '{root}' holds {base.kind}.")
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
    """The layers of teachers that a cache has, each after those it reads."""
    how = {name: value for name, value in given.items() if name in _HOW}
    if given.keys() - _HOW:
        names = ", ".join(f"--{name}" for name in _MODELS)
        raise click.UsageError(
            f"Name at least one teacher ({names}); without them, the layers that were begun are continued."
        )
    store = open_store(root)
    read_cache_document(store)
    documents = {layer: read_recipe_document(store, layer) for layer in layers_of(store)}
    kept = {layer: one for layer, one in documents.items() if one is not None and one.kind == TeacherRecipe.kind}
    if not kept:
        raise click.UsageError(f"'{root}' has no layer of a teacher yet; name one, as in --t5 google/flan-t5-base.")
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
