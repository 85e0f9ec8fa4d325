"""Caches that small models have taught, and what the models say when they are asked without forebay."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tests.helpers.tiny_models import TinyModels

import forebay as fb
from forebay.teachers import T5, Clip, GeometricSol, Lune, Sol, Teacher, TeacherRecipe

PROMPTS = (
    "red cat",
    "blue dog",
    "red cat",
    "two dog",
    "a house",
    "red cat",
    "blue dog",
    "the hill",
    "a house on the hill",
)
BUCKETS = (0.1, 0.55, 0.9)


def prompts_cache(folder: Path, prompts: tuple[str, ...] = PROMPTS) -> Path:
    """A cache of prompts, in three chunks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    fb.build(folder / "cache", fb.sources.lines(folder / "prompts.txt"), fb.RawRecipe(chunk_bytes=110), workers=0)
    return folder / "cache"


def images_cache(folder: Path, **fields: object) -> Path:
    """Five images of various shapes, letterboxed to 16 × 16, each with a caption, two or so to a chunk."""
    (folder / "images").mkdir(parents=True)
    random = np.random.default_rng(0)
    for number, (width, height) in enumerate([(16, 16), (16, 8), (6, 12), (30, 20), (5, 5)]):
        pixels = random.integers(0, 255, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"images/{number}.png")
        (folder / f"images/{number}.json").write_text(f'{{"caption": "{PROMPTS[number]}"}}')
    recipe = fb.ImageRecipe(**{"size": 16, "chunk_bytes": 1500, "tags": (), **fields})
    fb.build(folder / "cache", fb.sources.images(folder / "images"), recipe, workers=0)
    return folder / "cache"


def recipe(teacher: Teacher, **fields: object) -> TeacherRecipe:
    return TeacherRecipe(**{"teacher": teacher, "buckets": BUCKETS, "batch_size": 3, "stored": "float32", **fields})


def all_recipes(models: TinyModels, **fields: object) -> dict[str, TeacherRecipe]:
    """Every stage on prompts, in order."""
    teachers = (
        T5(model=models.t5, max_length=6),
        Clip(model=models.clip),
        Lune(unet=models.unet),
        Sol(unet=models.unet),
        GeometricSol(name="plain"),
    )
    return {teacher.layer_name(): recipe(teacher, **fields) for teacher in teachers}


@torch.inference_mode()
def plain_lune(unet: torch.nn.Module, latents: torch.Tensor, noise: float, states: torch.Tensor) -> np.ndarray:
    """The document's own way: a hook on the middle block, and a whole forward. Timestep 1000 is pure noise."""
    found: list[torch.Tensor] = []
    handle = unet.mid_block.register_forward_hook(lambda module, given, out: found.append(out.mean(dim=[2, 3])))
    unet(latents, torch.full((len(latents),), noise * 1000), encoder_hidden_states=states)
    handle.remove()
    return found[0].numpy()


def chunks_of(root: Path, layer: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "layers").glob(f"{layer}.*/0*.safetensors"))}
