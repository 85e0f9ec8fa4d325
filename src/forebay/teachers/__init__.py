"""Teachers: outputs of larger models, computed once per sample and read at any timestep.

recipes = fb.teachers.encodings(vae="sd/vae", t5="flan-t5-base", clip="clip")     # three layers
recipes["lune"] = fb.teachers.TeacherRecipe(teacher=fb.teachers.Lune(unet="sd/unet"))
fb.build_layers("caches/art", recipes)                                            # one model in memory at a time
features = fb.teachers.features(fb.open_cache("caches/art"), "lune")
features.at([5, 3, 9], t=[0.42, 0.15, 0.99])["lune"]
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.teachers.align import Alignment, LayerAlignment, check_alignment
    from forebay.teachers.batched_forward import unload
    from forebay.teachers.built_in import (
        SOL_STATS,
        T5,
        Clip,
        GeometricSol,
        Latents,
        LogProbs,
        Lune,
        Sol,
        geometric_spatial,
        geometric_stats,
    )
    from forebay.teachers.estimate import TeacherEstimate, estimate_teachers
    from forebay.teachers.feature_reader import Between, Features, Timed, features, weights_of_latents
    from forebay.teachers.hook import Hook, HookPoint, ImageInput, LatentInput, PromptInput, TokenInput
    from forebay.teachers.pipelines import encodings, pipeline
    from forebay.teachers.prompt_columns import empty_prompt
    from forebay.teachers.protocol import Batch, Loaded, Output, Teacher
    from forebay.teachers.recipe import TeacherRecipe
    from forebay.teachers.teacher_samples import BUCKETS, Neighbors, neighbors
# Where each public name lives.
_HOMES = {
    **dict.fromkeys(("Clip", "Latents", "T5"), "built_in"),
    **dict.fromkeys(("Between", "Features", "Timed", "features"), "feature_reader"),
    **dict.fromkeys(("GeometricSol", "geometric_spatial", "geometric_stats"), "built_in"),
    **dict.fromkeys(("Alignment", "LayerAlignment", "check_alignment"), "align"),
    **dict.fromkeys(("encodings", "pipeline"), "pipelines"),
    "LogProbs": "built_in",
    **dict.fromkeys(("Hook", "HookPoint", "ImageInput", "LatentInput", "PromptInput", "TokenInput"), "hook"),
    "weights_of_latents": "feature_reader",
    **dict.fromkeys(("Batch", "Loaded", "Output", "Teacher"), "protocol"),
    "TeacherRecipe": "recipe",
    "empty_prompt": "prompt_columns",
    **dict.fromkeys(("TeacherEstimate", "estimate_teachers"), "estimate"),
    "unload": "batched_forward",
    **dict.fromkeys(("BUCKETS", "Neighbors", "neighbors"), "teacher_samples"),
    **dict.fromkeys(("SOL_STATS", "Lune", "Sol"), "built_in"),
}
__all__ = [
    "BUCKETS", "SOL_STATS", "T5", "Alignment", "Batch", "Between", "Clip", "Features", "GeometricSol", "Hook",
    "HookPoint", "ImageInput", "LatentInput", "Latents", "LayerAlignment", "Loaded", "LogProbs", "Lune", "Neighbors",
    "Output", "PromptInput", "Sol", "Teacher", "TeacherEstimate", "TeacherRecipe", "Timed", "TokenInput",
    "check_alignment", "empty_prompt", "encodings", "estimate_teachers", "features", "geometric_spatial",
    "geometric_stats", "neighbors", "pipeline", "unload", "weights_of_latents",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"forebay.teachers.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'forebay.teachers' has no attribute '{name}'", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return list(__all__)
