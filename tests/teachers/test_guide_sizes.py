"""The tables of shapes and sizes in the guide are those of the models it names, by their published settings."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forebay.teachers import GeometricSol, Lune, TeacherRecipe, encodings, estimate_teachers, pipeline

GUIDE = (Path(__file__).parents[2] / "docs" / "guide-teachers.md").read_text()


def clip(width: int, projected: int = 0) -> dict[str, Any]:
    kind = "CLIPTextModelWithProjection" if projected else "CLIPTextModel"
    return {
        "model_type": "clip_text_model", "architectures": [kind], "hidden_size": width, "projection_dim": projected,
        "max_position_embeddings": 77,
    }  # fmt: skip


def t5(width: int) -> dict[str, Any]:
    return {"model_type": "t5", "architectures": ["T5EncoderModel"], "d_model": width}


def vae(channels: int) -> dict[str, Any]:
    return {
        "_class_name": "AutoencoderKL", "latent_channels": channels, "block_out_channels": [128, 256, 512, 512],
    }  # fmt: skip


def transformer(kind: str, layers: int, heads: int, head: int, **fields: Any) -> dict[str, Any]:
    own = {"_class_name": kind, "num_layers": layers, "num_attention_heads": heads, "attention_head_dim": head}
    return {**own, **fields}


UNET = {"_class_name": "UNet2DConditionModel", "sample_size": 64, "in_channels": 4}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "StableDiffusionPipeline": {
        "vae": vae(4), "text_encoder": clip(768), "unet": {**UNET, "block_out_channels": [320, 640, 1280, 1280]},
    },
    "StableDiffusionXLPipeline": {
        "vae": vae(4), "text_encoder": clip(768), "text_encoder_2": clip(1280, 1280),
        "unet": {**UNET, "sample_size": 128, "block_out_channels": [320, 640, 1280]},
    },
    "StableDiffusion3Pipeline": {
        "vae": vae(16), "text_encoder": clip(768, 768), "text_encoder_2": clip(1280, 1280), "text_encoder_3": t5(4096),
        "transformer": transformer("SD3Transformer2DModel", 24, 24, 64, sample_size=128, in_channels=16),
    },
    "FluxPipeline": {
        "vae": vae(16), "text_encoder": clip(768), "text_encoder_2": t5(4096),
        "transformer": transformer("FluxTransformer2DModel", 19, 24, 128, num_single_layers=38, in_channels=64),
    },
    "DiTPipeline": {
        "vae": vae(4),
        "transformer": transformer("DiTTransformer2DModel", 28, 16, 72, sample_size=32, in_channels=4),
    },
}  # fmt: skip
VIDEO_VAES = {
    "Wan 2.1": {"_class_name": "AutoencoderKLWan", "z_dim": 16, "dim_mult": [1, 2, 4, 4], "patch_size": None},
    "Qwen-Image": {"_class_name": "AutoencoderKLQwenImage", "z_dim": 16, "dim_mult": [1, 2, 4, 4]},
    "Wan 2.2": {"_class_name": "AutoencoderKLWan", "z_dim": 48, "dim_mult": [1, 2, 4, 4], "patch_size": 2},
}


def described(folder: Path, parts: dict[str, dict[str, Any]], kind: str = "") -> Path:
    """The folder of a pipeline without any weights."""
    for name, settings in parts.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(settings))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": kind, **{name: ["x", "y"] for name in parts}}))
    return folder


def row_of(title: str) -> str:
    """A row of the guide's table of models, as shapes without spaces."""
    (found,) = re.findall(rf"^\| {re.escape(title)}.*\|$", GUIDE, re.MULTILINE)
    return str(found).replace(" × ", "×")


@pytest.mark.parametrize(
    ("kind", "title"),
    list(zip(SETTINGS, ["Stable Diffusion 1.5", "SDXL", "SD3, SD3.5", "Flux.1", "DiT, SiT"], strict=True)),
)
def test_the_table_of_models_has_the_shapes_of_each_pipeline(tmp_path: Path, kind: str, title: str) -> None:
    recipes = pipeline(str(described(tmp_path, SETTINGS[kind], kind)), size=512, noise="noised")
    shapes = {
        size.column: "×".join(map(str, size.shape))
        for size in estimate_teachers(recipes, 1).columns
        if size.dtype == "float16"
    }
    row = row_of(title)
    texts: dict[str, list[str]] = {}
    for column, shape in shapes.items():
        if column in ("latents", "lune"):
            assert f" {shape}" in row, column
        else:
            texts.setdefault(column.rpartition("_")[0], []).append(shape)
    said = "; ".join(f"`{layer}` {', '.join(each)}" for layer, each in texts.items()) or "none: class numbers"
    assert f"| {said} |" in row


@pytest.mark.parametrize("name", VIDEO_VAES)
def test_the_table_of_models_has_the_latents_of_video_vaes(tmp_path: Path, name: str) -> None:
    described(tmp_path, {"vae": VIDEO_VAES[name]})
    (size,) = estimate_teachers(encodings(vae=str(tmp_path / "vae"), size=512), 1).columns
    row = row_of("Wan 2.2" if name == "Wan 2.2" else "Wan 2.1, Qwen-Image")
    assert f"| {'×'.join(map(str, size.shape))}, " in row


def test_the_table_of_sizes_is_that_of_the_commands_below_it(tmp_path: Path) -> None:
    described(tmp_path, {**SETTINGS["StableDiffusionPipeline"], "t5": t5(768)})
    parts = {"vae": f"{tmp_path}/vae", "t5": f"{tmp_path}/t5", "clip": f"{tmp_path}/text_encoder"}
    (side,) = re.findall(r"^forebay build images photos --into caches/art --size (\d+)$", GUIDE, re.MULTILINE)
    recipes = encodings(**parts, size=int(side))
    recipes["lune"] = TeacherRecipe(teacher=Lune(unet=f"{tmp_path}/unet"))
    recipes["sol"] = TeacherRecipe(teacher=GeometricSol())
    estimate = estimate_teachers(recipes, 10_000)
    table = GUIDE[GUIDE.index("| column | a sample | 10,000 |") :].partition("\n\n")[0]
    said = {
        name: int(size.replace(",", ""))
        for name, size in re.findall(r"^\| (?:`(\w+)` )?[^|]*\| ([\d,]+) B \|", table, re.MULTILINE)
        if name
    }
    small = {size.column for size in estimate.columns if size.row_bytes < 10}
    assert said == {size.column: size.row_bytes for size in estimate.columns if size.row_bytes >= 10}
    rest = sum(size.row_bytes for size in estimate.columns if size.column in small)
    assert f"| {rest} B | {rest * 10} kB |" in table
    assert f"| all | {estimate.row_bytes:,} B | {estimate.bytes / 1e9:.2f} GB |" in table
    constants = sum(size.bytes for size in estimate.columns if size.column.startswith("sol_"))
    assert f"| stored once | {constants / 1e3:.2f} kB |" in table
