"""The names of the document on teacher caches, as thin aliases: its examples run on caches of ours.

document                              here
DatasetCache, .build .save .load      a cache folder, whatever the name ends with
EncodingCache                         its layers latents, t5, clip
LuneFeatureCache, SolFeatureCache     its layers lune, sol, through `forebay.torch.features`
MultiSourceCache                      caches by data set, and absent rows where one has no such teacher
ModelZoo                              teachers, and `fb.build_layers`
compute_lune_loss, compute_sol_loss   `forebay.torch.distill`
"""

from forebay.torch.experts.config import TrainerConfig
from forebay.torch.experts.dataset import DatasetCache
from forebay.torch.experts.encodings import EncodingCache
from forebay.torch.experts.losses import compute_lune_loss, compute_sol_loss
from forebay.torch.experts.multi import MultiSourceCache
from forebay.torch.experts.timed import LuneFeatureCache, SolFeatureCache
from forebay.torch.experts.zoo import ModelZoo

__all__ = [
    "DatasetCache", "EncodingCache", "LuneFeatureCache", "ModelZoo", "MultiSourceCache", "SolFeatureCache",
    "TrainerConfig", "compute_lune_loss", "compute_sol_loss",
]  # fmt: skip
