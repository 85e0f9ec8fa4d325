"""The class names of the TinyFlux teacher-cache document, as thin aliases: its examples run on forebay caches.

document                              here
DatasetCache, .build .save .load      a cache folder, with any name
EncodingCache                         its layers latents, t5, clip
LuneFeatureCache, SolFeatureCache     its layers lune, sol, through `forebay.torch.features`
MultiSourceCache                      caches by data set; rows are absent where one lacks the teacher
ModelZoo                              teachers, and `fb.build_layers`
compute_lune_loss, compute_sol_loss   `forebay.torch.distill`
"""

from forebay.compat.tinyflux.datasets import (
    DatasetCache,
    EncodingCache,
    LuneFeatureCache,
    SolFeatureCache,
    TrainerConfig,
    compute_lune_loss,
    compute_sol_loss,
)
from forebay.compat.tinyflux.prompt_caches import ModelZoo
from forebay.torch.distill import MultiSourceCache

__all__ = [
    "DatasetCache", "EncodingCache", "LuneFeatureCache", "ModelZoo", "MultiSourceCache", "SolFeatureCache",
    "TrainerConfig", "compute_lune_loss", "compute_sol_loss",
]  # fmt: skip
