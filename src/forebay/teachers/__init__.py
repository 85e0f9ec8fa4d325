"""Teachers: what larger models say of samples, cached once, read at any timestep.

recipes = fb.teachers.encodings(vae="sd/vae", t5="flan-t5-base", clip="clip")     # three layers
recipes["lune"] = fb.teachers.TeacherRecipe(teacher=fb.teachers.Lune(unet="sd/unet"))
fb.build_layers("caches/art", recipes)                                            # one model in memory at a time
features = fb.teachers.features(fb.open_cache("caches/art"), "lune")
features.at([5, 3, 9], t=[0.42, 0.15, 0.99])["lune"]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.teachers.align import Alignment, LayerAlignment, check_alignment
    from forebay.teachers.encoders import T5, Clip, Latents
    from forebay.teachers.geometric import GeometricSol, geometric_spatial, geometric_stats
    from forebay.teachers.groups import encodings
    from forebay.teachers.hook import Hook
    from forebay.teachers.latent_weights import weights_of_latents
    from forebay.teachers.prompt_columns import SharedColumn, shared
    from forebay.teachers.protocol import Batch, Loaded, Output, Teacher
    from forebay.teachers.reading import Between, Features, features
    from forebay.teachers.recipe import TeacherRecipe
    from forebay.teachers.sizes import TeacherEstimate, estimate_teachers
    from forebay.teachers.slot import unload
    from forebay.teachers.timesteps import BUCKETS, Neighbours, neighbours
    from forebay.teachers.unet import SOL_STATS, Lune, Sol

# Where each public name lives.
_HOMES = {
    **dict.fromkeys(("Clip", "Latents", "T5"), "encoders"),
    **dict.fromkeys(("Between", "Features", "features"), "reading"),
    **dict.fromkeys(("GeometricSol", "geometric_spatial", "geometric_stats"), "geometric"),
    **dict.fromkeys(("Alignment", "LayerAlignment", "check_alignment"), "align"),
    "encodings": "groups",
    "Hook": "hook",
    "weights_of_latents": "latent_weights",
    **dict.fromkeys(("Batch", "Loaded", "Output", "Teacher"), "protocol"),
    "TeacherRecipe": "recipe",
    **dict.fromkeys(("SharedColumn", "shared"), "prompt_columns"),
    **dict.fromkeys(("TeacherEstimate", "estimate_teachers"), "sizes"),
    "unload": "slot",
    **dict.fromkeys(("BUCKETS", "Neighbours", "neighbours"), "timesteps"),
    **dict.fromkeys(("SOL_STATS", "Lune", "Sol"), "unet"),
}

__all__ = [
    "BUCKETS", "SOL_STATS", "T5", "Alignment", "Batch", "Between", "Clip", "Features", "GeometricSol", "Hook",
    "Latents", "LayerAlignment", "Loaded", "Lune", "Neighbours", "Output", "SharedColumn", "Sol", "Teacher",
    "TeacherEstimate", "TeacherRecipe", "check_alignment", "encodings", "estimate_teachers", "features",
    "geometric_spatial", "geometric_stats", "neighbours", "shared", "unload", "weights_of_latents",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"forebay.teachers.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'forebay.teachers' has no attribute '{name}'")


def __dir__() -> list[str]:
    return list(__all__)
