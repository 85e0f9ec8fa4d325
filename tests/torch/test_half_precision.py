"""Half precision: what a library keeps wide stays wide, however weights are loaded, and results stay near."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from tests.helpers import tiny_pipelines
from tests.helpers.tiny_models import TinyModels, tiny_unet, tiny_vae
from tests.helpers.tiny_pipelines import clip_config, saved, t5_encoder
from tests.torch.taught import images_cache
from torch import nn
from transformers import CLIPTextModelWithProjection

import forebay as fb
from forebay.errors import RecipeMismatch
from forebay.teachers import Latents, TeacherRecipe
from forebay.torch.teachers.loading import input_like, load_model

pytestmark = pytest.mark.usefixtures("one_thread")


def wan_transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=8, ffn_dim=16, num_layers=1, rope_max_seq_len=16,
    )  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "t5": t5_encoder,
    "clip": lambda: CLIPTextModelWithProjection(clip_config(16)),
    "vae": tiny_vae,
    "unet": tiny_unet,
    "sd3": tiny_pipelines.sd3_transformer,
    "flux": tiny_pipelines.flux_transformer,
    "dit": tiny_pipelines.dit_transformer,
    "wan": wan_transformer,
}
WIDE = {("t5", "float16"): {"wo"}, ("wan", "float16"): {"norm2"}, ("wan", "bfloat16"): {"norm2"}}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_what_the_library_keeps_wide_stays_wide(tmp_path: Path, name: str, dtype: str) -> None:
    """With weights from another file it is what `from_pretrained` of the library decides."""
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    found: list[dict[str, torch.dtype]] = []
    for other in (None, str(weights)):
        loaded: nn.Module = load_model(type(model), str(tmp_path), other, "cpu", dtype)
        found.append({key: value.dtype for key, value in loaded.named_parameters()})
        assert input_like(loaded).dtype == getattr(torch, dtype)
    assert found[0] == found[1]
    wide = {key for key, kept in found[0].items() if kept == torch.float32}
    expected = WIDE.get((name, dtype), set())
    assert expected <= {part for key in wide for part in key.split(".")}
    assert bool(wide) == bool(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        pytest.param(tiny_pipelines.sd3, "bfloat16", id="sd3-bfloat16"),
        pytest.param(tiny_pipelines.flux, "float16", id="flux-float16"),
        pytest.param(tiny_pipelines.sd3, "float16", id="sd3-float16", marks=pytest.mark.long),
        pytest.param(tiny_pipelines.flux, "bfloat16", id="flux-bfloat16", marks=pytest.mark.long),
    ],
)
def test_a_pipeline_in_half_precision_is_near_the_same_in_float32(
    tmp_path: Path, make: Callable[..., Any], dtype: str
) -> None:
    model = saved(tmp_path / "model", make)
    root = images_cache(tmp_path)
    told = {"prompt_column": "metadata", "prompt_key": "caption", "max_length": 6, "size": 16, "noise": "noised"}
    seen = []
    for compute in ("float32", dtype):
        recipes = fb.teachers.pipeline(
            str(model), dtype=compute, stored="float32", buckets=(0.2, 0.8), batch_size=2, **told
        )
        fb.build_layers(root, recipes, replace=list(recipes))
        cache = fb.open_cache(root, layers=list(recipes))
        assert cache.read(range(5), ["lune.present"])["lune.present"].all()
        read = {"lune": cache.read(range(5), ["lune"])["lune"], "t5": cache.read(range(5), ["t5_states"])["t5_states"]}
        pooled = "clip_pooled" if "clip" in recipes else "clip_g_pooled"
        seen.append({**read, "clip": cache.read([0, 1], [pooled])[pooled]})
    for name, wide in seen[0].items():
        near = np.abs(seen[1][name] - wide).max() / np.abs(wide).max()
        assert 0 < near < (0.01 if dtype == "float16" else 0.06), name


def test_a_vae_whose_configuration_forces_float32_computes_in_it(tmp_path: Path, tiny_models: TinyModels) -> None:
    """As SDXL's pipelines do: its VAE overflows in float16."""
    tiny_vae().save_pretrained(tmp_path / "free")
    config = (tmp_path / "free" / "config.json").read_text()
    assert '"force_upcast": true' in config
    root = images_cache(tmp_path)
    recipe = TeacherRecipe(teacher=Latents(vae=str(tmp_path / "free"), size=16), dtype="float16")
    report = fb.build(root, None, recipe)
    assert fb.open_cache(root).recipe("latents").fields["dtype"] == "float32"
    assert any("'latents' computes in float32" in note for note in report.notes)
    assert fb.build(root, None, recipe).built == 0  # the same layer
    (tmp_path / "free" / "config.json").write_text(config.replace('"force_upcast": true', '"force_upcast": false'))
    with pytest.raises(RecipeMismatch, match="dtype"):
        fb.build(root, None, recipe)
