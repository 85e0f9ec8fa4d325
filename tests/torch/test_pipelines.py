"""Whole pipelines, and the VAEs of Wan and Qwen-Image: every number is what the model's own pipeline computes.

Each oracle runs the pipeline itself, with a hook on the block. Latents and noise are passed into it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    DiTPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxImg2ImgPipeline,
    FluxPipeline,
    QwenImageImg2ImgPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3Pipeline,
    WanVideoToVideoPipeline,
)
from PIL import Image
from tests.helpers import tiny_pipelines
from tests.helpers.option_pairs import dealt
from tests.helpers.tiny_pipelines import CLASSES, saved
from tests.torch.taught import images_cache, prompts_cache

import forebay as fb
from forebay.errors import ModelUnusable
from forebay.read.cache import Cache
from forebay.teachers import Latents, Lune, Sol, TeacherRecipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
BUCKETS = (0.25, 0.75)
SHARE = 0.25  # of noise at the second bucket: t = 0 is noise
STEPS = 1000
# float32 is summed in another order by batches of another size; what is stored as float16 is rounded to 11 bits.
CLOSE = {"float32": 1e-6, "float16": 1e-3}
TYPES = list(CLOSE)
SINGLE: dict[str, dict[str, int]] = {"stable_diffusion": {"num_images_per_prompt": 1}, "sdxl": {}}


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("sd3"), tiny_pipelines.sd3)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("flux"), tiny_pipelines.flux)


@pytest.fixture(scope="module")
def dit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("dit"), tiny_pipelines.dit)


def built(root: Path, model: Path, **fields: Any) -> tuple[Cache, dict[str, TeacherRecipe]]:
    """A cache with all layers of a pipeline."""
    how = {"buckets": BUCKETS, "stored": "float32", "batch_size": 4}
    recipes = fb.teachers.pipeline(str(model), **{**how, **fields})
    fb.build_layers(root, recipes)
    return fb.open_cache(root, layers=list(recipes)), recipes


def noise_at(cache: Cache, recipe: TeacherRecipe, shape: tuple[int, ...], bucket: int = 1) -> torch.Tensor:
    """The noise that a teacher is promised at a bucket: a function of seed, sample and bucket."""
    rows = np.arange(len(cache))
    batch = recipe._forward_with().batch(
        recipe._samples(cache.read(rows, recipe.reads)), rows, np.full(len(rows), bucket)
    )
    return torch.from_numpy(batch.noise(shape))


def prompts_of(cache: Cache) -> list[str]:
    return [bytes(cache[row]["data"]).decode() for row in range(len(cache))]


def captions_of(cache: Cache) -> list[str]:
    return [json.loads(bytes(cache[row]["metadata"]))["caption"] for row in range(len(cache))]


def pixels_of(cache: Cache) -> torch.Tensor:
    """Canvases as an image processor hands them to a VAE, from -1 to 1."""
    canvases = np.full((len(cache), 3, 16, 16), 114, np.uint8)
    for row, canvas in enumerate(canvases):
        left, top, width, height = cache[row]["box"].tolist()
        canvas[:, top : top + height, left : left + width] = cache[row]["pixels"].reshape(3, height, width)
    return torch.from_numpy(canvases).float() / 127.5 - 1


def tagged_images(folder: Path) -> tuple[Path, list[int]]:
    """A cache of three images, and their classes."""
    (folder / "images").mkdir()
    for number, name in enumerate(("dog", "cat", "dog")):
        Image.new("RGB", (16, 16), (80 * number, 10, 10)).save(folder / f"images/{number}.png")
        (folder / f"images/{number}.json").write_text(json.dumps({"tags": name}))
    recipe = fb.ImageRecipe(size=16, tags=("cat", "dog"))
    fb.build(folder / "cache", fb.sources.images(folder / "images"), recipe, workers=0)
    return folder / "cache", [1, 0, 1]


def watched(block: torch.nn.Module, run: Callable[[], object]) -> np.ndarray:
    """The image tokens, or cells, of a block's output in the first forward of `run`, averaged."""
    seen: list[torch.Tensor] = []

    def note(module: object, given: object, out: Any) -> None:
        value = out[1] if isinstance(out, tuple) else out
        seen.append(value.mean(dim=1 if value.ndim == 3 else (2, 3)))

    handle = block.register_forward_hook(note)
    with torch.inference_mode():
        run()
    handle.remove()
    return seen[0].numpy()


def quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def away(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(np.float32) - other).max())


@pytest.mark.parametrize(("kind", "stored"), dealt(["stable_diffusion", "sdxl"], TYPES))
def test_a_unet_on_prompts_is_what_its_pipeline_computes(tmp_path: Path, kind: str, stored: str) -> None:
    model = saved(tmp_path / "model", getattr(tiny_pipelines, kind))
    cache, recipes = built(prompts_cache(tmp_path), model, stored=stored, denoiser={"image_size": 16})
    rows, prompts = range(len(cache)), prompts_of(cache)
    pipeline = quiet(DiffusionPipeline.from_pretrained(model))
    with torch.inference_mode():
        found = pipeline.encode_prompt(prompts, device="cpu", do_classifier_free_guidance=False, **SINGLE[kind])
    texts = [layer for layer in recipes if layer != "lune"]
    ours = np.concatenate([cache.read(rows, [f"{layer}_states"])[f"{layer}_states"] for layer in texts], -1)
    assert away(ours, found[0].numpy()) < CLOSE[stored]
    if kind == "sdxl":
        assert away(cache.read(rows, ["clip_g_pooled"])["clip_g_pooled"], found[2].numpy()) < CLOSE[stored]

    noise = noise_at(cache, recipes["lune"], (4, 8, 8))
    call = {"timesteps": [int(SHARE * STEPS)], "guidance_scale": 1.0, "output_type": "latent"}
    expected = watched(pipeline.unet.mid_block, lambda: pipeline(prompts, height=16, width=16, latents=noise, **call))
    assert away(cache.read(rows, ["lune"])["lune"][:, 1], expected) < CLOSE[stored]


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_sd3_on_prompts_is_what_its_pipeline_computes(sd3: Path, tmp_path: Path, stored: str) -> None:
    cache, recipes = built(prompts_cache(tmp_path), sd3, max_length=6, stored=stored)
    rows, prompts = range(len(cache)), prompts_of(cache)
    pipeline = quiet(StableDiffusion3Pipeline.from_pretrained(sd3))
    with torch.inference_mode():
        states, _, pooled, _ = pipeline.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=6
        )
    clip = np.concatenate([cache.read(rows, [f"clip_{one}_states"])[f"clip_{one}_states"] for one in "lg"], -1)
    assert away(clip, states[:, :8, : clip.shape[-1]].numpy()) < CLOSE[stored]
    assert away(cache.read(rows, ["t5_states"])["t5_states"], states[:, 8:].numpy()) < CLOSE[stored]
    ours = np.concatenate([cache.read(rows, [f"clip_{one}_pooled"])[f"clip_{one}_pooled"] for one in "lg"], -1)
    assert away(ours, pooled.numpy()) < CLOSE[stored]

    noise = noise_at(cache, recipes["lune"], (4, 8, 8))
    call = {"num_inference_steps": 1, "sigmas": [SHARE], "guidance_scale": 1.0, "output_type": "latent"}
    expected = watched(
        pipeline.transformer.transformer_blocks[1],
        lambda: pipeline(prompts, height=16, width=16, latents=noise, max_sequence_length=6, **call),
    )
    assert away(cache.read(rows, ["lune"])["lune"][:, 1], expected) < CLOSE[stored]


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_flux_on_images_is_what_its_pipeline_computes(
    flux: Path, tmp_path: Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"prompt_column": "metadata", "prompt_key": "caption", "max_length": 6}
    cache, recipes = built(images_cache(tmp_path), flux, size=16, noise="noised", stored=stored, **told)
    rows, prompts = range(len(cache)), captions_of(cache)
    pipeline = quiet(FluxPipeline.from_pretrained(flux))
    with torch.inference_mode():
        states, pooled, _ = pipeline.encode_prompt(prompts, max_sequence_length=6)
    assert away(cache.read(rows, ["t5_states"])["t5_states"], states.numpy()) < CLOSE[stored]
    assert away(cache.read(rows, ["clip_pooled"])["clip_pooled"], pooled.numpy()) < CLOSE[stored]

    latents = vae_latents(FluxImg2ImgPipeline._encode_vae_image, pipeline.vae, pixels_of(cache), monkeypatch)
    stored_latents = cache.read(rows, ["latents"])["latents"]
    assert away(stored_latents, latents.numpy()) < CLOSE[stored]

    noise = noise_at(cache, recipes["lune"], (4, 8, 8))
    pipeline.scheduler.set_timesteps(sigmas=[SHARE])
    data = torch.from_numpy(stored_latents.astype(np.float32))
    noised = pipeline.scheduler.scale_noise(data, pipeline.scheduler.timesteps, noise)
    packed = pipeline._pack_latents(noised, len(prompts), 4, 8, 8)
    call = {"num_inference_steps": 1, "sigmas": [SHARE], "guidance_scale": 3.5, "output_type": "latent"}
    expected = watched(
        pipeline.transformer.single_transformer_blocks[0],
        lambda: pipeline(prompts, height=16, width=16, latents=packed, max_sequence_length=6, **call),
    )
    assert away(cache.read(rows, ["lune"])["lune"][:, 1], expected) < CLOSE[stored]


def vae_latents(
    encode: Callable[..., torch.Tensor], vae: torch.nn.Module, pixels: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """The latents that a pipeline's own method makes, without the draw from the posterior."""
    monkeypatch.setattr(
        "diffusers.models.autoencoders.vae.randn_tensor", lambda shape, **how: torch.zeros(shape, dtype=how["dtype"])
    )
    with torch.inference_mode():
        return encode(SimpleNamespace(vae=vae), pixels, None)


def test_sd3_latents_are_shifted_and_scaled_as_its_pipeline_does(
    sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = images_cache(tmp_path)
    fb.build(root, None, TeacherRecipe(teacher=Latents(vae=f"{sd3}/vae", size=16), stored="float32", batch_size=2))
    cache = fb.open_cache(root, layers=["latents"])
    pipeline = StableDiffusion3Pipeline.from_pretrained(sd3)
    zeros = "diffusers.models.autoencoders.vae.randn_tensor"
    monkeypatch.setattr(zeros, lambda shape, **how: torch.zeros(shape, dtype=how["dtype"]))
    whole = StableDiffusion3Img2ImgPipeline(**pipeline.components)
    whole.scheduler.set_timesteps(sigmas=[1.0, 0.0])
    with torch.inference_mode():  # at the step without noise
        expected = whole.prepare_latents(
            pixels_of(cache), whole.scheduler.timesteps[1:2], len(cache), 1, torch.float32, "cpu"
        )
    assert away(cache.read(range(len(cache)), ["latents"])["latents"], expected.numpy()) < 1e-6


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_a_dit_with_classes_is_what_its_pipeline_computes(
    dit: Path, tmp_path: Path, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = [3, 0, 9, CLASSES]
    (tmp_path / "lines").write_text("".join(f'{{"class": {label}}}\n' for label in classes))
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "lines"), fb.RawRecipe(), workers=0)
    cache, recipes = built(root, dit, labels="data.class", stored=stored)
    assert list(recipes) == ["lune"]
    noise = noise_at(cache, recipes["lune"], (4, 8, 8))
    monkeypatch.setattr("diffusers.pipelines.dit.pipeline_dit.randn_tensor", lambda **how: noise)
    pipeline = quiet(DiTPipeline.from_pretrained(dit))
    monkeypatch.setattr(
        pipeline.scheduler, "set_timesteps", lambda steps: setattr(pipeline.scheduler, "num_inference_steps", steps)
    )
    pipeline.scheduler.timesteps = torch.tensor([int(SHARE * STEPS)])
    expected = watched(
        pipeline.transformer.transformer_blocks[1],
        lambda: pipeline(classes, guidance_scale=1.0, num_inference_steps=1, output_type="pt"),
    )
    assert away(cache.read(range(len(cache)), ["lune"])["lune"][:, 1], expected) < CLOSE[stored]


@pytest.mark.parametrize(("count", "stored"), dealt([1, 1000], TYPES))
def test_a_sit_is_what_its_sampler_computes(tmp_path: Path, stored: str, count: int) -> None:
    """A SiT is a DiT whose time runs from noise at 0 to data at 1, on a linear path: x(t) = t·data + (1-t)·noise.

    `count` 1 is its own time; a flow trainer of diffusers may have counted to 1000 instead.
    """
    sampler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=count, invert_sigmas=True)
    model = saved(tmp_path / "sit", tiny_pipelines.dit, scheduler=sampler)
    root, classes = tagged_images(tmp_path)
    cache, recipes = built(root, model, size=16, noise="noised", labels="tags", stored=stored)
    data = torch.from_numpy(cache.read(range(len(cache)), ["latents"])["latents"].astype(np.float32))
    sampler.set_timesteps(sigmas=[SHARE])
    t = sampler.timesteps[0] / count
    assert t == 1 - SHARE
    x = t * data + (1 - t) * noise_at(cache, recipes["lune"], (4, 8, 8))
    transformer = DiTPipeline.from_pretrained(model).transformer
    expected = watched(
        transformer.transformer_blocks[1],
        lambda: transformer(x, sampler.timesteps.expand(len(x)), torch.tensor(classes)),
    )
    assert away(cache.read(range(len(cache)), ["lune"])["lune"][:, 1], expected) < CLOSE[stored]


def wan_vae(**fields: Any) -> AutoencoderKLWan:
    own = {
        "base_dim": 8, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [False],
        "latents_mean": [0.1, -0.2, 0.3, 0.4], "latents_std": [1.5, 2.0, 2.5, 0.5], "scale_factor_spatial": 2,
    }  # fmt: skip
    return AutoencoderKLWan(**{**own, **fields}).eval()


def qwen_vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.3, 0.4], latents_std=[1.5, 2.0, 2.5, 0.5],
    ).eval()  # fmt: skip


@pytest.mark.parametrize(("kind", "stored"), dealt(["wan", "wan 2.2", "qwen"], TYPES))
def test_latents_of_wan_and_qwen_are_what_their_pipelines_make(
    tmp_path: Path, kind: str, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    patched = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 4}
    vae = qwen_vae() if kind == "qwen" else wan_vae(**(patched if kind == "wan 2.2" else {}))
    vae.save_pretrained(tmp_path / "vae")
    root = images_cache(tmp_path)
    teacher = Latents(vae=str(tmp_path / "vae"), size=16)
    fb.build(root, None, TeacherRecipe(teacher=teacher, stored=stored, batch_size=2))
    cache = fb.open_cache(root, layers=["latents"])
    video = pixels_of(cache).unsqueeze(2)
    if kind == "qwen":
        expected = vae_latents(QwenImageImg2ImgPipeline._encode_vae_image, vae, video, monkeypatch)
    else:  # added noise, but for none of it
        whole = SimpleNamespace(
            vae=vae, vae_scale_factor_temporal=4, vae_scale_factor_spatial=2,
            scheduler=SimpleNamespace(add_noise=lambda data, noise, step: data),
        )  # fmt: skip
        with torch.inference_mode():
            expected = WanVideoToVideoPipeline.prepare_latents(
                whole, video, len(cache), 4, 16, 16, torch.float32, torch.device("cpu")
            )
    found = cache.read(range(len(cache)), ["latents"])["latents"]
    assert found.shape == (len(cache), 4, *((4, 4) if kind == "wan 2.2" else (8, 8)))
    assert away(found, expected.squeeze(2).numpy()) < CLOSE[stored]


def test_sd3_without_t5_reads_zeros_as_its_pipeline_does(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", tiny_pipelines.sd3, text_encoder_3=None, tokenizer_3=None)
    cache, recipes = built(prompts_cache(tmp_path / "prompts"), model)
    assert list(recipes) == ["clip_l", "clip_g", "lune"]
    pipeline = quiet(StableDiffusion3Pipeline.from_pretrained(model, text_encoder_3=None, tokenizer_3=None))
    noise, prompts = noise_at(cache, recipes["lune"], (4, 8, 8)), prompts_of(cache)
    call = {"num_inference_steps": 1, "sigmas": [SHARE], "guidance_scale": 1.0, "output_type": "latent"}
    expected = watched(
        pipeline.transformer.transformer_blocks[1],
        lambda: pipeline(prompts, height=16, width=16, latents=noise, **call),
    )
    assert away(cache.read(range(len(cache)), ["lune"])["lune"][:, 1], expected) < 1e-6


def test_attention_of_a_dit_is_watched_and_leaves_its_forward_as_it_is(dit: Path, tmp_path: Path) -> None:
    teacher = Sol(unet=f"{dit}/transformer", text="", side=4)
    root = prompts_cache(tmp_path)
    fb.build(root, None, TeacherRecipe(teacher=teacher, buckets=BUCKETS, stored="float32"))
    read = fb.open_cache(root).read(range(3), ["sol_stats", "sol_spatial"])
    assert np.allclose(read["sol_spatial"].sum(axis=(2, 3)), 1, atol=1e-5)
    assert read["sol_stats"].min() >= 0
    watching = teacher.load("cpu", "float32")._denoiser.module
    plain = DiTPipeline.from_pretrained(dit).transformer
    given = {"timestep": torch.tensor([10.0, 900.0]), "class_labels": torch.tensor([1, 2])}
    with torch.inference_mode():
        latents = torch.randn(2, 4, 8, 8)
        assert torch.allclose(watching(latents, **given).sample, plain(latents, **given).sample, atol=1e-5)


def test_what_is_not_supported_is_refused_with_what_it_is(sd3: Path, flux: Path, dit: Path, tmp_path: Path) -> None:
    def refused(teacher: Any, said: str) -> None:
        with pytest.raises(ModelUnusable, match=said):
            (teacher.files(), teacher.load("cpu", "float32"))

    refused(Lune(unet=f"{flux}/transformer"), r"a FluxTransformer2DModel takes text='t5_states', pooled='clip_pooled'")
    refused(Lune(unet=f"{sd3}/transformer", text="t5_states"), r"SD3Transformer2DModel takes text='clip_l_states")
    refused(Lune(unet=f"{dit}/transformer"), r"a DiTTransformer2DModel takes text='', labels=")
    refused(Lune(unet=f"{sd3}/vae"), r"its class is AutoencoderKL; supported denoisers are .*Flux.*SD3.*UNet2D")
    for kind in ("WanTransformer3DModel", "QwenImageTransformer2DModel"):
        (tmp_path / "config.json").write_text(json.dumps({"_class_name": kind}))
        refused(
            Lune(unet=str(tmp_path)), f"its class is {kind}; supported denoisers are .*\nhint: for another, use Hook"
        )
    refused(Sol(unet=f"{flux}/transformer", text="t5_states", pooled="clip_pooled"), "over text and image together")
    with pytest.raises(ModelUnusable, match="its class is SD3Transformer2DModel; supported VAEs are AutoencoderKL,"):
        Latents(vae=f"{sd3}/transformer").outputs()
    with pytest.raises(ModelUnusable, match="its class is T5EncoderModel, of the kind 't5'; a CLIP text encoder"):
        fb.teachers.Clip(model=f"{flux}/text_encoder_2").outputs()
    with pytest.raises(ModelUnusable, match="its class is CLIPTextModel, of the kind 'clip_text_model'; a T5"):
        fb.teachers.T5(model=f"{flux}/text_encoder").outputs()
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    with pytest.raises(ModelUnusable, match=r"(?s)WanPipeline; supported pipelines are DiT.*hint: .*vae='.*/vae'"):
        fb.teachers.pipeline(str(tmp_path))
    with pytest.raises(ModelUnusable, match=r"it has no model_index.json\nhint: pass the folder of a whole pipeline"):
        fb.teachers.pipeline(f"{flux}/vae")


def test_a_sample_without_a_class_that_the_dit_knows_is_an_absent_row(dit: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"class": 3}\n{"class": 99}\n{"other": 1}\n{"class": true}\nno JSON\n')
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "lines"), fb.RawRecipe(), workers=0)
    cache, _ = built(root, dit, labels="data.class")
    assert cache.read(range(5), ["lune.present"])["lune.present"].tolist() == [True, False, False, False, False]
    failed = fb.status(root).failed_samples
    assert [(one.layer, one.reason, one.detail.partition(": ")[2]) for one in failed] == [
        ("lune", "unusable", label) for label in ("99", "None", "None", "None")
    ]
