"""Teachers: outputs of larger models, computed once per sample and read at any timestep.

recipes = fb.teachers.encodings(vae="sd/vae", t5="flan-t5-base", clip="clip")     # three layers
recipes["lune"] = fb.teachers.TeacherRecipe(teacher=fb.teachers.Lune(unet="sd/unet"))
fb.build_layers("caches/art", recipes)                                            # one model in memory at a time
features = fb.teachers.features(fb.open_cache("caches/art"), "lune")
features.at([5, 3, 9], t=[0.42, 0.15, 0.99])["lune"]
"""

from typing import TYPE_CHECKING

from forebay.exports import lazy_exports

# fmt: off
# isort: off
if TYPE_CHECKING:
    from forebay.teachers.align import (
        Alignment as Alignment, LayerAlignment as LayerAlignment, check_alignment as check_alignment,
    )
    from forebay.teachers.batched_forward import unload as unload
    from forebay.teachers.built_in import (
        SOL_STATS as SOL_STATS, T5 as T5, Clip as Clip, GeometricSol as GeometricSol, Latents as Latents,
        LogProbs as LogProbs, Lune as Lune, Sol as Sol, geometric_spatial as geometric_spatial,
        geometric_stats as geometric_stats,
    )
    from forebay.teachers.estimate import TeacherEstimate as TeacherEstimate, estimate_teachers as estimate_teachers
    from forebay.teachers.feature_reader import (
        Between as Between, Features as Features, Timed as Timed, features as features,
        weights_of_latents as weights_of_latents,
    )
    from forebay.teachers.hook import (
        Hook as Hook, HookPoint as HookPoint, ImageInput as ImageInput, LatentInput as LatentInput,
        PromptInput as PromptInput, TokenInput as TokenInput,
    )
    from forebay.teachers.pipelines import encodings as encodings, pipeline as pipeline
    from forebay.teachers.prompt_columns import empty_prompt as empty_prompt
    from forebay.teachers.protocol import Batch as Batch, Loaded as Loaded, Output as Output, Teacher as Teacher
    from forebay.teachers.recipe import TeacherRecipe as TeacherRecipe
    from forebay.teachers.teacher_samples import BUCKETS as BUCKETS, Neighbors as Neighbors, neighbors as neighbors
# fmt: on
# isort: on

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
