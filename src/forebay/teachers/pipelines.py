"""The teacher layers of separate encoders, or of a whole pipeline of diffusers.

recipes = fb.teachers.pipeline("flux", size=1024, noise="noised")     # latents, clip, t5, lune
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from forebay.teachers.built_in import T5, Clip, Latents, Lune, NoiseKind
from forebay.teachers.protocol import Teacher, pipeline_index, scheduler_config, unusable
from forebay.teachers.recipe import TeacherRecipe


def encodings(
    *,
    vae: str | None = None,
    t5: str | None = None,
    clip: str | None = None,
    size: int = 512,
    pad_color: Sequence[int] = (114, 114, 114),
    storage: Literal["raw", "jpeg"] = "raw",
    sample: Literal["mean", "seeded"] = "mean",
    max_length: int = 128,
    ragged: bool = False,
    projected: bool = False,
    **fields: Any,
) -> dict[str, TeacherRecipe]:
    """Return a recipe for each model that is named: latents, T5 states, CLIP states. `fields` are recipe fields."""
    teachers: list[Teacher] = []
    red, green, blue = pad_color
    if vae is not None:
        teachers.append(Latents(vae=vae, size=size, pad_color=(red, green, blue), storage=storage, sample=sample))
    if t5 is not None:
        teachers.append(T5(model=t5, max_length=max_length, ragged=ragged))
    if clip is not None:
        teachers.append(Clip(model=clip, projected=projected))
    return {teacher.layer_name(): TeacherRecipe(teacher=teacher, **fields) for teacher in teachers}


Parts = tuple[list[Teacher], dict[str, Any]]  # text encoders, and the fields of the denoiser's teacher


def _stable_diffusion(at: str, max_length: int | None) -> Parts:
    return [Clip(model=f"{at}/text_encoder")], {"unet": f"{at}/unet"}


def _sdxl(at: str, max_length: int | None) -> Parts:
    first = Clip(model=f"{at}/text_encoder", states_layer=-2, keeps=("states",), name="clip_l")
    second = Clip(model=f"{at}/text_encoder_2", states_layer=-2, projected=True, name="clip_g")
    return [first, second], {
        "unet": f"{at}/unet",
        "text": "clip_l_states+clip_g_states",
        "pooled": "clip_g_pooled",
    }


def _sd3(at: str, max_length: int | None) -> Parts:
    texts: list[Teacher] = [
        Clip(model=f"{at}/text_encoder", states_layer=-2, projected=True, name="clip_l"),
        Clip(model=f"{at}/text_encoder_2", states_layer=-2, projected=True, name="clip_g"),
    ]
    if pipeline_index(at).get("text_encoder_3", (None,))[0]:  # SD3 also runs without T5
        texts.append(T5(model=f"{at}/text_encoder_3", max_length=max_length or 256, masked=False))
    return texts, {
        "unet": f"{at}/transformer",
        "text": "+".join(f"{text.layer_name()}_states" for text in texts),
        "pooled": "clip_l_pooled+clip_g_pooled",
    }


def _flux(at: str, max_length: int | None) -> Parts:
    pooled = Clip(model=f"{at}/text_encoder", keeps=("pooled",))
    states = T5(model=f"{at}/text_encoder_2", max_length=max_length or 512, masked=False)
    return [pooled, states], {"unet": f"{at}/transformer", "text": "t5_states", "pooled": "clip_pooled"}


def _dit(at: str, max_length: int | None) -> Parts:
    return [], {"unet": f"{at}/transformer", "text": ""}


PIPELINES: dict[str, Callable[[str, int | None], Parts]] = {
    "DiTPipeline": _dit,
    "FluxPipeline": _flux,
    "StableDiffusion3Pipeline": _sd3,
    "StableDiffusionPipeline": _stable_diffusion,
    "StableDiffusionXLPipeline": _sdxl,
}


def _timesteps(at: str) -> dict[str, float]:
    """Return the timesteps of noise and of data that the pipeline's scheduler passes to its denoiser."""
    config = scheduler_config(at) if pipeline_index(at).get("scheduler") else {}
    last = float(config.get("num_train_timesteps", 1000))
    ends = (0.0, last) if config.get("invert_sigmas") else (last, 0.0)
    return dict(zip(("noise_timestep", "data_timestep"), ends, strict=True))


def pipeline(
    model: str,
    *,
    size: int | None = None,
    pad_color: Sequence[int] = (114, 114, 114),
    storage: Literal["raw", "jpeg"] = "raw",
    sample: Literal["mean", "seeded"] = "mean",
    max_length: int | None = None,
    noise: NoiseKind = "pure",
    labels: str = "",
    denoiser: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, TeacherRecipe]:
    """Return the recipes of a pipeline's layers, in build order: latents, encodings of prompts, denoiser features.

    `model` is the folder of a whole pipeline, or its name on the hub. Latents are made if `size`, that of the images,
    is passed. `max_length` is the number of T5's tokens, by default the pipeline's. `denoiser` are further fields of
    its `Lune`, and `fields` those of all recipes.
    """
    at = model.rstrip("/")
    kind = str(pipeline_index(at).get("_class_name"))
    if kind not in PIPELINES:
        raise unusable(
            model,
            f"its class is {kind}; supported pipelines are {', '.join(PIPELINES)}",
            hint=f"a supported part of another can be used alone, as in vae='{at}/vae'",
        )
    texts, own = PIPELINES[kind](at, max_length)
    teachers: list[Teacher] = []
    if size is not None:
        red, green, blue = pad_color
        teachers.append(
            Latents(vae=f"{at}/vae", size=size, pad_color=(red, green, blue), storage=storage, sample=sample)
        )
    sized = {"image_size": size} if size is not None and noise == "noised" else {}
    lune = Lune(**{**own, **sized, **_timesteps(at), "noise": noise, "labels": labels, **(denoiser or {})})
    timed = {"buckets": fields.pop("buckets")} if "buckets" in fields else {}
    recipes = {teacher.layer_name(): TeacherRecipe(teacher=teacher, **fields) for teacher in [*teachers, *texts]}
    return {**recipes, lune.layer_name(): TeacherRecipe(teacher=lune, **fields, **timed)}
