"""Models of other kinds than Stable Diffusion 1.5, each against its own pipeline; noise shared by buckets."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from tests.tiny_models import TinyModels, _tokenizer, tiny_vae
from tests.torch.taught import prompts_cache
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import forebay as fb
from forebay.errors import TeacherUnusable
from forebay.teachers import Clip, Latents, Lune, Sol, TeacherRecipe, features, shared

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE, SECOND, PROJECTED = 16, 24, 12


def text_config(width: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=32, hidden_size=width, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=2, eos_token_id=1, pad_token_id=1, projection_dim=PROJECTED,
    )  # fmt: skip


def sdxl_unet(**fields: object) -> UNet2DConditionModel:
    settings = {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16), "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "norm_num_groups": 4, "attention_head_dim": 4,
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": WIDE + SECOND,
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + PROJECTED,
    }  # fmt: skip
    return UNet2DConditionModel(**{**settings, **fields}).eval()


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdxl")
    torch.manual_seed(3)
    tokenizers = {}
    for name in ("tokenizer", "tokenizer_2"):
        tokenizers[name] = _tokenizer(bos=True)
        tokenizers[name].model_max_length = 8
    pipeline = StableDiffusionXLPipeline(
        vae=tiny_vae(),
        text_encoder=CLIPTextModel(text_config(WIDE)).eval(),
        text_encoder_2=CLIPTextModelWithProjection(text_config(SECOND)).eval(),
        unet=sdxl_unet(),
        scheduler=EulerDiscreteScheduler(),
        **tokenizers,
    )
    pipeline.save_pretrained(folder)
    return folder


def recipes(sdxl: Path, **lune: object) -> dict[str, TeacherRecipe]:
    first = Clip(model=f"{sdxl}/text_encoder", keeps=("states",), states_layer=-2, name="clip_l")
    second = Clip(model=f"{sdxl}/text_encoder_2", states_layer=-2, projected=True, name="clip_g")
    unet = {"unet": f"{sdxl}/unet", "text": "clip_l_states+clip_g_states", "pooled": "clip_g_pooled"}
    how = {"stored": "float32", "batch_size": 4}
    return {
        "clip_l": TeacherRecipe(teacher=first, **how),
        "clip_g": TeacherRecipe(teacher=second, **how),
        "lune": TeacherRecipe(teacher=Lune(**unet, **lune), buckets=(0.2, 0.8), **how),
    }


def test_sdxl_is_what_its_own_pipeline_computes(sdxl: Path, tmp_path: Path) -> None:
    root = prompts_cache(tmp_path)
    fb.build_layers(root, recipes(sdxl))
    cache = fb.open_cache(root, layers=["clip_l", "clip_g", "lune"])
    rows = range(len(cache))
    prompts = [bytes(cache[row]["data"]).decode() for row in rows]
    pipeline = StableDiffusionXLPipeline.from_pretrained(sdxl)
    with torch.inference_mode():
        states, _, pooled, _ = pipeline.encode_prompt(prompts, device="cpu", do_classifier_free_guidance=False)
        ids = pipeline._get_add_time_ids((64, 64), (0, 0), (64, 64), torch.float32, PROJECTED).repeat(len(prompts), 1)
    joined = np.concatenate([shared(cache, f"{name}_states").read(rows) for name in ("clip_l", "clip_g")], -1)
    assert np.abs(joined - states.numpy()).max() < 1e-5
    assert np.abs(shared(cache, "clip_g_pooled").read(rows) - pooled.numpy()).max() < 1e-5

    seen = []
    pipeline.unet.mid_block.register_forward_hook(lambda module, given, out: seen.append(out.mean(dim=(2, 3))))
    model = recipes(sdxl)["lune"]
    noise = model._forward_with().batch(
        model._samples(cache.read(rows, model.reads)), np.arange(len(prompts)), np.ones(len(prompts), int)
    )
    with torch.inference_mode():
        pipeline.unet(
            torch.from_numpy(noise.noise((4, 8, 8))),
            torch.full((len(prompts),), 0.2 * 1000),  # t = 0.8 from noise is 200 of 1000 for the UNet
            encoder_hidden_states=states,
            added_cond_kwargs={"text_embeds": pooled, "time_ids": ids},
        )
    found = cache.read(rows, ["lune"])["lune"][:, 1]
    assert np.abs(found - seen[0].numpy()).max() < 1e-5


def test_a_whole_sdxl_pipeline_names_the_same_teachers(sdxl: Path) -> None:
    """Those whose numbers the test above compares; with images, time ids have their size."""
    how = {"stored": "float32", "batch_size": 4, "buckets": (0.2, 0.8)}
    assert fb.teachers.pipeline(str(sdxl), **how) == recipes(sdxl)
    with_images = fb.teachers.pipeline(f"{sdxl}/", size=64, noise="noised", **how)
    assert list(with_images) == ["latents", "clip_l", "clip_g", "lune"]
    assert with_images["latents"].model == Latents(vae=f"{sdxl}/vae", size=64)
    assert with_images["lune"] == recipes(sdxl, noise="noised", image_size=64)["lune"]


def test_a_unet_that_takes_other_inputs_is_refused_with_what_it_is(
    sdxl: Path, tiny_models: TinyModels, tmp_path: Path
) -> None:
    def load(**fields: object) -> None:
        Lune(**fields).load("cpu", "float32")

    with pytest.raises(TeacherUnusable, match="SDXL kind: pass pooled="):
        load(unet=f"{sdxl}/unet")
    with pytest.raises(TeacherUnusable, match="leave out pooled"):
        load(unet=tiny_models.unet, pooled="clip_pooled")
    with pytest.raises(TeacherUnusable, match="pass projected=True"):
        Clip(model=f"{sdxl}/text_encoder_2").load("cpu", "float32")
    kinds = {"addition_embed_type": None, "class_embed_type": "timestep"}
    sdxl_unet(**kinds).save_pretrained(tmp_path / "classes")
    with pytest.raises(TeacherUnusable, match="class_embed_type is timestep; such UNets are not supported"):
        load(unet=str(tmp_path / "classes"))
    sdxl_unet(addition_embed_type=None, only_cross_attention=True).save_pretrained(tmp_path / "crossed")
    with pytest.raises(TeacherUnusable, match="no map for Sol"):
        Sol(unet=str(tmp_path / "crossed")).load("cpu", "float32")


def test_one_noise_for_all_buckets_makes_features_between_them_closer(tiny_models: TinyModels, tmp_path: Path) -> None:
    root = prompts_cache(tmp_path)
    how = {"stored": "float32", "batch_size": 4}
    made = {"clip": TeacherRecipe(teacher=Clip(model=tiny_models.clip), **how)}
    for per in ("bucket", "sample"):
        for name, grid in {"coarse": (0.4, 0.6), "fine": (0.4, 0.5, 0.6)}.items():
            teacher = Lune(unet=tiny_models.unet, noise_per=per, name=f"{per}_{name}")
            made[teacher.name] = TeacherRecipe(teacher=teacher, buckets=grid, **how)
    fb.build_layers(root, made)
    cache = fb.open_cache(root, layers=list(made))
    rows = list(range(len(cache)))
    away = {}
    for per in ("bucket", "sample"):
        true = features(cache, f"{per}_fine").at(rows, 0.5)[f"{per}_fine"]
        away[per] = np.abs(features(cache, f"{per}_coarse").at(rows, 0.5)[f"{per}_coarse"] - true).mean()
    assert away["sample"] < away["bucket"] / 2
    assert fb.fingerprint(made["bucket_fine"]) != fb.fingerprint(made["sample_fine"])
