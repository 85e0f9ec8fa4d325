"""Hooks on models that are called by hand as well: a ViT, a CLIP image tower, a causal LM, a UNet, BERT."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from PIL import Image
from tests.helpers.byte_tokens import VOCABULARY, ByteTokens
from tests.helpers.tiny_models import TinyModels, _tokenizer
from tests.torch.taught import BUCKETS, PROMPTS, chunks_of, images_cache, prompts_cache, recipe
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2Model,
    LlamaConfig,
    LlamaForCausalLM,
)

import forebay as fb
from forebay.errors import ModelUnusable, RecipeInvalid
from forebay.teachers import (
    Batch,
    Clip,
    Hook,
    HookPoint,
    ImageInput,
    LatentInput,
    Latents,
    PromptInput,
    TokenInput,
    features,
)
from forebay.teachers.teacher_samples import noise_keys, normal
from forebay.torch.teachers import Captures

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
SAID = {"prompt_column": "metadata", "prompt_key": "caption"}


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT, a CLIP image tower, a causal language model and BERT, in folders of their names."""
    folder = tmp_path_factory.mktemp("towers")
    torch.manual_seed(5)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vit = {**small, "patch_size": 4, "image_size": 12}
    Dinov2Model(Dinov2Config(**vit)).eval().save_pretrained(folder / "dino")
    clip = CLIPVisionConfig(**vit, intermediate_size=24, projection_dim=8)
    CLIPVisionModelWithProjection(clip).eval().save_pretrained(folder / "clip")
    llama = LlamaConfig(**small, intermediate_size=24, vocab_size=VOCABULARY, max_position_embeddings=32)
    LlamaForCausalLM(llama).eval().save_pretrained(folder / "llama")
    bert = BertConfig(**small, intermediate_size=24, vocab_size=32, max_position_embeddings=16, pad_token_id=0)
    BertModel(bert).eval().save_pretrained(folder / "bert")
    _tokenizer(bos=True).save_pretrained(folder / "bert")
    return folder


@pytest.fixture
def pictured(tmp_path: Path) -> Path:
    return images_cache(tmp_path)


@torch.inference_mode()
def by_hand(model: torch.nn.Module, submodule: str, **arguments: object) -> torch.Tensor:
    """What a hook on a submodule of a whole forward finds."""
    found: list[Any] = []
    handle = model.get_submodule(submodule).register_forward_hook(lambda module, given, out: found.append(out))
    model(**arguments)
    handle.remove()
    return found[0][0] if isinstance(found[0], tuple) else found[0]


def contents(cache: fb.Cache) -> list[Image.Image]:
    read = cache.read(range(len(cache)), ["pixels", "box"])
    shapes = [(3, int(height), int(width)) for _, _, width, height in read["box"]]
    return [
        Image.fromarray(np.ascontiguousarray(pixels.reshape(shape).transpose(1, 2, 0)))
        for pixels, shape in zip(read["pixels"], shapes, strict=True)
    ]


def normalized(images: list[Image.Image], mean: object, std: object) -> torch.Tensor:
    values = np.stack([np.asarray(image) for image in images]) / 255
    return torch.from_numpy(((values - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2)).float()


def letterboxed(image: Image.Image, size: int) -> Image.Image:
    scale = min(1, size / image.width, size / image.height)
    small = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.BICUBIC)
    canvas = Image.new("RGB", (size, size), (114, 114, 114))
    canvas.paste(small, ((size - small.width) // 2, (size - small.height) // 2))
    return canvas


def cropped(image: Image.Image, size: int) -> Image.Image:
    """As the preprocessors of CLIP do: the shorter side resized, the center cropped."""
    short = min(image.size)
    width, height = (int(size * side / short) for side in image.size)
    large = image.resize((width, height), Image.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return large.crop((left, top, left + size, top + size))


def test_several_hooks_on_a_vit_read_one_forward(pictured: Path, towers: Path) -> None:
    hook = Hook(
        model=f"{towers}/dino", architecture="Dinov2Model", images=ImageInput(), name="dino",
        points=(
            HookPoint("cls", "layernorm", (16,), "first"),
            HookPoint("patches", "layernorm", (10, 16), "none"),
            HookPoint("middle", "encoder.layer.0", (16,)),
        ),
    )  # fmt: skip
    (note,) = [note for note in fb.build(pictured, None, recipe(hook)).notes if "ran" in note]
    cache = fb.open_cache(pictured)
    read = cache.read(range(5), ["dino_cls", "dino_patches", "dino_middle"])
    images = normalized([letterboxed(image, 12) for image in contents(cache)], ImageInput().mean, ImageInput().std)
    model = Dinov2Model.from_pretrained(towers / "dino").eval()
    norm = by_hand(model, "layernorm", pixel_values=images)
    assert np.allclose(read["dino_cls"], norm[:, 0], atol=1e-5)
    assert np.allclose(read["dino_patches"], norm, atol=1e-5)
    middle = by_hand(model, "encoder.layer.0", pixel_values=images)
    assert np.allclose(read["dino_middle"], middle.mean(dim=1), atol=1e-5)
    assert f"ran {1 + len(cache.chunk_numbers)} forward" in note, "a trial, and one for each chunk"


@pytest.mark.parametrize("storage", ["raw", "jpeg"])
def test_a_clip_image_tower_gets_the_crops_that_its_preprocessor_makes(
    tmp_path: Path, towers: Path, storage: str
) -> None:
    root = images_cache(tmp_path, storage=storage)
    mean, std = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
    hook = Hook(
        model=f"{towers}/clip", architecture="CLIPVisionModelWithProjection", name="clip_image",
        images=ImageInput(size=12, fit="crop", mean=mean, std=std, storage=storage),
        submodule="visual_projection", shape=(8,), pooling="none",
    )  # fmt: skip
    fb.build(root, None, recipe(hook))
    cache = fb.open_cache(root)
    if storage == "raw":
        images = contents(cache)
    else:
        (tmp_path / "jpegs").mkdir()
        for row, stored in enumerate(cache.read(range(5), ["jpeg"])["jpeg"]):
            (tmp_path / f"jpegs/{row}.jpg").write_bytes(stored.tobytes())
        images = [Image.open(tmp_path / f"jpegs/{row}.jpg") for row in range(5)]
    model = CLIPVisionModelWithProjection.from_pretrained(towers / "clip").eval()
    with torch.inference_mode():
        expected = model(normalized([cropped(image, 12) for image in images], mean, std)).image_embeds
    assert np.allclose(cache.read(range(5), ["clip_image"])["clip_image"], expected, atol=1e-5)


def test_the_documents_of_token_rows_are_run_one_by_one(tmp_path: Path, towers: Path) -> None:
    (tmp_path / "lines.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    root = tmp_path / "cache"
    tokens = ByteTokens(sequence_length=16, chunk_rows=5)
    fb.build(root, fb.sources.lines(tmp_path / "lines.txt"), tokens, workers=0)
    hook = Hook(
        model=f"{towers}/llama", architecture="AutoModelForCausalLM", tokens=TokenInput(), name="llm",
        arguments={"use_cache": False},
        points=(
            HookPoint("last", "model.norm", (16,), "last"),
            HookPoint("mean", "model.layers.0", (16,)),
            HookPoint("states", "model.layers.1", (16, 16), "none"),
        ),
    )  # fmt: skip
    fb.build(root, None, recipe(hook))
    cache = fb.open_cache(root, layers=["llm"])
    read = cache.read(range(len(cache)), ["tokens", "seq_lens", "llm_last", "llm_mean", "llm_states"])
    model = LlamaForCausalLM.from_pretrained(towers / "llama").eval()
    documents = 0
    for row in range(len(cache)):
        start = 0
        for number, length in enumerate(read["seq_lens"][row].tolist()):
            ids = torch.from_numpy(read["tokens"][row][start : start + length].astype(np.int64))[None]
            assert np.allclose(
                read["llm_last"][row][number], by_hand(model, "model.norm", input_ids=ids)[0, -1], atol=1e-5
            )
            first = by_hand(model, "model.layers.0", input_ids=ids)
            assert np.allclose(read["llm_mean"][row][number], first[0].mean(dim=0), atol=1e-5)
            second = by_hand(model, "model.layers.1", input_ids=ids)
            assert np.allclose(read["llm_states"][row][start : start + length], second[0], atol=1e-5)
            start, documents = start + length, documents + 1
        assert len(read["llm_last"][row]) == len(read["seq_lens"][row])
        assert not read["llm_states"][row][start:].any()
    assert documents > len(cache) > 5


@pytest.mark.parametrize("direction", ["t0_noise", "t0_data"])
def test_a_unet_gets_latents_at_t_and_its_own_timestep(pictured: Path, tiny_models: TinyModels, direction: str) -> None:
    hook = Hook(
        model=tiny_models.unet, architecture="UNet2DConditionModel", latents=LatentInput(), name="mid",
        arguments={"encoder_hidden_states": "clip_states"}, shared=("clip_states",),
        submodule="mid_block", shape=(16,), pooling="spatial_mean", time_direction=direction,
    )  # fmt: skip
    layers = {
        "latents": recipe(Latents(vae=tiny_models.vae, size=16)),
        "clip": recipe(Clip(model=tiny_models.clip), **SAID),
        "mid": recipe(hook),
    }
    fb.build_layers(pictured, layers)
    cache = fb.open_cache(pictured)
    unet = UNet2DConditionModel.from_pretrained(tiny_models.unet).eval()
    states = torch.from_numpy(cache.read(range(5), ["clip_states"])["clip_states"])
    read = cache.read(range(5), ["id", "latents", "mid"])
    keys = noise_keys([row.tobytes() for row in read["id"]])
    for bucket, t in enumerate(BUCKETS):
        share = 1 - t if direction == "t0_noise" else t
        noise = torch.from_numpy(normal(0, keys, np.full(5, bucket), (4, 8, 8)))
        mixed = (1 - share) * torch.from_numpy(read["latents"]) + share * noise
        timestep = torch.full((5,), 1000 * share)
        found = by_hand(unet, "mid_block", sample=mixed, timestep=timestep, encoder_hidden_states=states)
        assert np.allclose(read["mid"][:, bucket], found.mean(dim=(2, 3)), atol=1e-5)
        assert np.allclose(features(cache, "mid").at(range(5), 1 - share, "t0_noise")["mid"], read["mid"][:, bucket])


def test_padding_of_prompts_is_left_out_of_pooled_outputs_and_equal_prompts_are_stored_once(
    tmp_path: Path, towers: Path
) -> None:
    root = prompts_cache(tmp_path)
    hook = Hook(
        model=f"{towers}/bert", architecture="BertModel", prompts=PromptInput(max_length=8), name="bert",
        points=(
            HookPoint("mean", "encoder.layer.1", (16,)),
            HookPoint("last", "encoder.layer.1", (16,), "last"),
            HookPoint("pooled", "pooler", (16,), "none"),
        ),
    )  # fmt: skip
    fb.build(root, None, recipe(hook))
    cache = fb.open_cache(root)
    tokenizer, model = AutoTokenizer.from_pretrained(towers / "bert"), BertModel.from_pretrained(towers / "bert").eval()
    for row, prompt in enumerate(PROMPTS):
        alone = tokenizer(prompt, return_tensors="pt")  # without any padding
        given = {name: alone[name] for name in ("input_ids", "attention_mask")}
        states = by_hand(model, "encoder.layer.1", **given)[0]
        for name, expected in {"mean": states.mean(dim=0), "last": states[-1]}.items():
            assert np.allclose(cache.read([row], [f"bert_{name}"])[f"bert_{name}"][0], expected, atol=1e-5)
        assert np.allclose(
            cache.read([row], ["bert_pooled"])["bert_pooled"][0], by_hand(model, "pooler", **given), atol=1e-5
        )
    stored = np.concatenate([np.unique(chunk["bert_mean_row"]) for chunk in cache.chunks(["bert_mean_row"])])
    assert len(stored) < len(PROMPTS)


def test_an_output_that_is_written_into_later_is_stored_as_it_was() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 2))
    values = torch.randn(5, 3)
    captures = Captures(module, {"linear": "0", "end": "2"}, "sequence")
    batch = Batch(("a",), {}, (), None, np.zeros(1, np.int64), np.zeros(1, np.uint64), 0)
    with torch.inference_mode():
        found = captures.of(batch, lambda: module(values))
        captures.close()
        assert torch.equal(found["linear"], module[0](values))
    assert (found["linear"] < 0).any()
    assert found["end"].shape == (5, 2)


def dino(towers: Path, **fields: object) -> Hook:
    plain = {"submodule": "layernorm", "shape": (16,), "images": ImageInput()}
    return Hook(**{"model": f"{towers}/dino", "architecture": "Dinov2Model", "name": "dino", **plain, **fields})


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "no point": ({"submodule": ""}, "either a submodule with its shape, or several points"),
    "both": ({"points": (HookPoint("a", "layernorm", (16,)),)}, "either a submodule with its shape, or several points"),
    "mixed": ({"tokens": TokenInput()}, "runs each document by itself, so it takes no images"),
    "latents": ({"latents": LatentInput(column="")}, "either the column that holds them, or with column='' a shape"),
    "points": (
        {"submodule": "", "points": (HookPoint("a", "layernorm", (16,)), HookPoint("a", "embeddings", (16,)))},
        "two points are named 'a', and would fill one column",
    ),
    "inputs": ({"arguments": {"pixel_values": "states"}}, "two inputs fill the argument 'pixel_values' of the model"),
    "shared": ({"shared": ("states",)}, "shared names 'states', which is not the column of an argument"),
    "type": ({"images": {"size": "large"}}, "has a field of the wrong type"),
}


@pytest.mark.parametrize(("fields", "said"), REFUSED.values(), ids=REFUSED)
def test_a_hook_that_makes_no_sense_is_refused(towers: Path, fields: Mapping[str, Any], said: str) -> None:
    with pytest.raises(RecipeInvalid, match=said):
        recipe(dino(towers, **fields))


FAILING: dict[str, tuple[Mapping[str, Any], type[Exception], str]] = {
    "missing": (
        {"latents": LatentInput(), "arguments": {"other": "depth"}},
        RecipeInvalid,
        r"(?s)layer 'dino' reads the columns 'depth', 'latents', which no layer .* has; there are: .*build the layer",
    ),
    "ragged": (
        {"arguments": {"bool_masked_pos": "pixels"}},
        ModelUnusable,
        r"column 'pixels' for its argument 'bool_masked_pos' has rows of different lengths\nhint: name it in shared",
    ),
    "shape": (
        {"submodule": "embeddings.dropout", "arguments": {"output_hidden_states": True}, "shape": (3,)},
        fb.errors.ModelUnusable,
        r"returned 'dino' of shape \(3, 16\) .* it declares the shape \(3, 3\)",
    ),
    "no part": ({"submodule": "head"}, ModelUnusable, "it has no submodule 'head'; it has embeddings"),
    "argument": (
        {"images": ImageInput(argument="image")},
        ModelUnusable,
        "its forward takes no 'image', but pixel_values",
    ),
}


@pytest.mark.parametrize(("fields", "error", "said"), list(FAILING.values()), ids=FAILING)
def test_what_is_wrong_with_a_hook_is_named(
    pictured: Path, towers: Path, fields: Mapping[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        fb.build(pictured, None, recipe(dino(towers, **fields)))
    assert chunks_of(pictured, "dino") == {}
