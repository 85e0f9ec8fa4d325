"""Built-in teachers say what their models say when these are asked directly, and nothing when they cannot be."""

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from tests.helpers.cache_files import layer_path
from tests.helpers.tiny_models import TinyModels, tiny_unet
from tests.torch.taught import (
    BUCKETS,
    PROMPTS,
    all_recipes,
    chunks_of,
    images_cache,
    plain_lune,
    prompts_cache,
    recipe,
)
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

import forebay as fb
from forebay.columns import Ragged
from forebay.errors import ForebayError, ModelUnusable, RecipeMismatch
from forebay.teachers import (
    T5,
    Batch,
    Clip,
    Hook,
    Latents,
    Loaded,
    Lune,
    Output,
    Sol,
    Teacher,
    features,
    weights_of_latents,
)
from forebay.teachers.teacher_samples import noise_keys, normal
from forebay.torch.teachers import Captures
from forebay.torch.teachers.run_denoiser import attention_received, attention_statistics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, tiny_models: TinyModels) -> Path:
    """A cache with every stage on it."""
    torch.set_num_threads(1)
    root = prompts_cache(tmp_path_factory.mktemp("taught"))
    fb.build_layers(root, all_recipes(tiny_models))
    return root


def noise_of(cache: fb.Cache, bucket: int, purpose: str = "noise") -> torch.Tensor:
    ids = [row.tobytes() for row in cache.read(range(len(cache)), ["id"])["id"]]
    return torch.from_numpy(normal(0, noise_keys(ids), np.full(len(ids), bucket), (4, 8, 8), purpose))


def test_states_of_prompts_are_those_of_the_models(taught: Path, tiny_models: TinyModels) -> None:
    cache = fb.open_cache(taught)
    every = range(len(cache))
    with torch.inference_mode():
        tokens = AutoTokenizer.from_pretrained(tiny_models.t5)(
            list(PROMPTS), padding="max_length", max_length=6, truncation=True, return_tensors="pt"
        )
        states = T5EncoderModel.from_pretrained(tiny_models.t5).eval()(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        )
        ids = AutoTokenizer.from_pretrained(tiny_models.clip)(
            list(PROMPTS), padding="max_length", max_length=8, truncation=True, return_tensors="pt"
        )["input_ids"]
        clip = CLIPTextModel.from_pretrained(tiny_models.clip).eval()(input_ids=ids)
    assert np.allclose(cache.read(every, ["t5_states"])["t5_states"], states.last_hidden_state, atol=1e-5)
    assert np.array_equal(cache.read(every, ["t5_mask"])["t5_mask"], tokens["attention_mask"].bool())
    assert np.allclose(cache.read(every, ["clip_states"])["clip_states"], clip.last_hidden_state, atol=1e-5)
    assert np.allclose(cache.read(every, ["clip_pooled"])["clip_pooled"], clip.pooler_output, atol=1e-5)


def test_lune_is_the_mean_of_the_middle_block(taught: Path, tiny_models: TinyModels) -> None:
    cache = fb.open_cache(taught)
    unet = UNet2DConditionModel.from_pretrained(tiny_models.unet).eval()
    states = torch.from_numpy(cache.read(range(len(cache)), ["clip_states"])["clip_states"])
    stored = cache.read(range(len(cache)), ["lune"])["lune"]
    for bucket, moment in enumerate(BUCKETS):
        expected = plain_lune(unet, noise_of(cache, bucket), 1 - moment, states)
        assert np.allclose(stored[:, bucket], expected, atol=1e-5)
        assert np.array_equal(features(cache, "lune").at(range(len(cache)), moment)["lune"], stored[:, bucket])


def test_sol_is_within_its_ranges_and_leaves_the_forward_as_it_is(taught: Path, tiny_models: TinyModels) -> None:
    read = fb.open_cache(taught).read(range(len(PROMPTS)), ["sol_stats", "sol_spatial"])
    assert read["sol_stats"].min() >= 0
    assert read["sol_stats"].max() <= 1
    assert read["sol_spatial"].min() >= 0
    assert np.allclose(read["sol_spatial"].sum(axis=(2, 3)), 1, atol=1e-5)
    runner = Sol(unet=tiny_models.unet).load("cpu", "float32")
    watched, plain = runner._denoiser.module, UNet2DConditionModel.from_pretrained(tiny_models.unet).eval()
    given = (torch.randn(2, 4, 8, 8), torch.tensor([100.0, 900.0]), torch.randn(2, 8, 16))
    with torch.inference_mode():
        assert torch.allclose(watched(*given).sample, plain(*given).sample, atol=1e-5)


def test_statistics_of_known_attention() -> None:
    each = torch.eye(16).expand(2, 3, 16, 16)
    assert torch.allclose(attention_statistics(each), torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(2, 4), atol=1e-6)
    spread = torch.full((2, 3, 16, 16), 1 / 16)
    found = attention_statistics(spread)[0]
    assert torch.allclose(found[1:], torch.tensor([1.0, 1.0, 0.0]), atol=1e-5)
    assert 0.4 < found[0] < 0.7
    assert torch.allclose(attention_received(spread, 8), torch.full((2, 8, 8), 1 / 64))
    corner = torch.zeros(1, 1, 256, 256)
    corner[..., 0] = 1
    received = attention_received(corner, 8)
    assert received[0, 0, 0] == 1
    assert received.sum() == 1


@pytest.mark.parametrize("layer", ["t5", "clip", "lune", "sol"])
def test_batch_sizes_and_timesteps_together_agree_to_a_hundred_thousandth(
    taught: Path, tiny_models: TinyModels, layer: str
) -> None:
    cache = fb.open_cache(taught)
    own = all_recipes(tiny_models)[layer]
    rows = {name: next(cache.chunks([name]))[name] for name in (*own.reads, "data")}
    usual = own.make(rows).columns
    for batch_size, together in product((1, 3, 8), (False, True) if own.model.timed else (False,)):
        other = msgspec.structs.replace(own, batch_size=batch_size, batch_timesteps=together)
        made = other.make(rows).columns
        for column in own.columns():
            one, two = (getattr(values[column.name], "values", values[column.name]) for values in (made, usual))
            assert one.shape == two.shape
            assert np.allclose(one.astype(float), two.astype(float), rtol=0, atol=1e-5), (batch_size, column.name)
    own.release()


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory, tiny_models: TinyModels) -> Path:
    """A cache of images with latents, states of captions, and Lune on noised latents."""
    torch.set_num_threads(1)
    root = images_cache(tmp_path_factory.mktemp("pictured"))
    said = {"prompt_column": "metadata", "prompt_key": "caption"}
    layers = {
        "latents": recipe(Latents(vae=tiny_models.vae, size=16)),
        "sampled": recipe(Latents(vae=tiny_models.vae, size=16, sample="seeded", name="sampled")),
        "clip": recipe(Clip(model=tiny_models.clip), **said),
        "lune": recipe(Lune(unet=tiny_models.unet, noise="noised")),
        "back": recipe(Lune(unet=tiny_models.unet, noise="noised", time_direction="t0_data", name="back")),
    }
    fb.build_layers(root, layers)
    return root


def test_latents_are_those_of_the_letterboxed_image(pictured: Path, tiny_models: TinyModels) -> None:
    cache = fb.open_cache(pictured)
    vae = AutoencoderKL.from_pretrained(tiny_models.vae).eval()
    canvas = np.full((5, 3, 16, 16), 114, np.uint8)
    base = cache.read(range(5), ["pixels", "box"])
    for row, (left, top, width, height) in enumerate(base["box"].tolist()):
        canvas[row, :, top : top + height, left : left + width] = base["pixels"][row].reshape(3, height, width)
    with torch.inference_mode():
        found = vae.encode(torch.from_numpy(canvas.astype(np.float32) / 127.5 - 1)).latent_dist
    read = cache.read(range(5), ["latents", "sampled"])
    assert np.allclose(read["latents"], found.mean * vae.config.scaling_factor, atol=1e-5)
    drawn = found.mean + found.std * noise_of(cache, 0, "latents")
    assert np.allclose(read["sampled"], drawn * vae.config.scaling_factor, atol=1e-5)
    assert not np.allclose(read["sampled"], read["latents"], atol=1e-3)


def test_the_loss_mask_of_latents_is_the_rectangle_pooled_to_their_grid(pictured: Path) -> None:
    cache = fb.open_cache(pictured)
    weights = weights_of_latents(cache, range(5))
    assert weights.shape == (5, 8, 8)
    boxes = cache.read(range(5), ["box"])["box"]
    assert np.allclose(weights.sum(axis=(1, 2)) * 4, boxes[:, 2] * boxes[:, 3])
    assert weights[0].min() == 1
    assert weights[1][:2].max() == 0


def test_noised_latents_go_from_noise_to_data_in_the_direction_that_is_said(
    pictured: Path, tiny_models: TinyModels
) -> None:
    cache = fb.open_cache(pictured)
    unet = UNet2DConditionModel.from_pretrained(tiny_models.unet).eval()
    states = torch.from_numpy(cache.read(range(5), ["clip_states"])["clip_states"])
    read = cache.read(range(5), ["latents", "lune", "back"])
    latents = torch.from_numpy(read["latents"])
    for bucket, moment in enumerate(BUCKETS):
        noise = noise_of(cache, bucket)
        forth, back = moment * latents + (1 - moment) * noise, (1 - moment) * latents + moment * noise
        assert np.allclose(read["lune"][:, bucket], plain_lune(unet, forth, 1 - moment, states), atol=1e-5)
        assert np.allclose(read["back"][:, bucket], plain_lune(unet, back, moment, states), atol=1e-5)


def test_features_are_read_in_the_direction_that_the_caller_says(pictured: Path) -> None:
    """`lune` and `back` were made of the same mixes and timesteps, at t and 1 - t."""
    cache = fb.open_cache(pictured)
    forth, back = features(cache, "lune"), features(cache, "back")
    for t in (0.05, 0.42, 0.95, np.float32(0.15)):
        same = forth.at(range(5), t)["lune"]
        assert np.array_equal(forth.at(range(5), t, "t0_noise")["lune"], same)
        assert np.allclose(forth.at(range(5), 1 - t, "t0_data")["lune"], same, atol=1e-5)
        assert np.allclose(
            back.at(range(5), 1 - t, "t0_noise")["back"], back.at(range(5), t, "t0_data")["back"], atol=1e-5
        )
    stored = cache.read(range(5), ["back"])["back"]
    for bucket, t in enumerate(BUCKETS):  # mirrored nodes are exact as well
        assert np.array_equal(back.at(range(5), round(1 - t, 2), "t0_noise")["back"], stored[:, bucket])
    with pytest.raises(ValueError, match="made with time_direction='t0_data'; pass direction='t0_noise'"):
        back.at(range(5), 0.5)
    with pytest.raises(ValueError, match=r"direction must be 't0_noise' or 't0_data' \(got 'up'\)"):
        forth.at(range(5), 0.5, "up")  # type: ignore[arg-type]


def test_t5_in_float16_agrees_with_float32_where_its_inner_layer_overflows(
    tmp_path: Path, tiny_models: TinyModels
) -> None:
    model = T5EncoderModel.from_pretrained(tiny_models.t5)
    with torch.no_grad():
        for block in model.encoder.block:
            block.layer[-1].DenseReluDense.wo.weight.mul_(3e4)  # its output is beyond 65,504, and normalized after
            block.layer[-1].DenseReluDense.wi.weight.mul_(50.0)
    model.save_pretrained(tmp_path / "t5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny_models.t5) / name, tmp_path / "t5" / name)
    rows = {"id": Ragged.of_bytes([b"a", b"b"]), "data": Ragged.of_bytes([b"a red cat", b"the hill"])}
    made = {}
    for dtype in ("float32", "float16"):
        own = recipe(T5(model=str(tmp_path / "t5"), max_length=6), dtype=dtype, stored="float32")
        made[dtype] = own.make(rows)
        own.release()
    wide, narrow = (np.asarray(made[dtype].columns["t5_states"].values) for dtype in ("float32", "float16"))
    assert made["float16"].present.all() == np.isfinite(narrow).all()
    assert np.allclose(wide, narrow, atol=0.05)


def test_fine_tuned_weights_are_taken_over_the_configuration_of_another(
    tmp_path: Path, taught: Path, tiny_models: TinyModels
) -> None:
    torch.manual_seed(9)
    tuned = tiny_unet()
    save_file(tuned.state_dict(), tmp_path / "tuned.safetensors")
    teacher = Lune(unet=tiny_models.unet, weights=str(tmp_path / "tuned.safetensors"), name="tuned")
    root = tmp_path / "cache"
    shutil.copytree(taught, root)
    fb.build(root, None, recipe(teacher))
    cache = fb.open_cache(root)
    states = torch.from_numpy(cache.read(range(len(cache)), ["clip_states"])["clip_states"])
    expected = plain_lune(tuned, noise_of(cache, 1), 1 - BUCKETS[1], states)
    assert np.allclose(cache.read(range(len(cache)), ["tuned"])["tuned"][:, 1], expected, atol=1e-5)
    save_file({**tuned.state_dict(), "conv_in.bias": torch.ones(8)}, tmp_path / "tuned.safetensors")
    with pytest.raises(RecipeMismatch, match=r"layer 'tuned' .*differs in: unet/tuned.safetensors"):
        fb.build(root, None, recipe(teacher))


class TwoPaths(torch.nn.Module):
    """A module of which one part is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(states)
        return out


class OwnModule(Teacher, frozen=True, kw_only=True, tag="own-module"):
    """A hook on a module of one's own, pooled in a way of one's own."""

    timed: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("clip_states", "clip_states_row")

    part: str = "used"

    def outputs(self) -> tuple[Output, ...]:
        return (Output("own", (4,)),)

    def load(self, device: str, dtype: str) -> Loaded:
        torch.manual_seed(0)
        module = TwoPaths()
        captures = Captures(module, {"own": self.part}, "module")

        @torch.inference_mode()
        def run(batch: Batch) -> dict[str, np.ndarray]:
            states = torch.from_numpy(batch.array("clip_states")[..., :8])
            return {"own": captures.of(batch, lambda: module(states))["own"].amin(dim=1).numpy() * 2}

        return run


def test_a_hook_listens_to_a_module_of_ones_own_with_any_pooling(tmp_path: Path, taught: Path) -> None:
    shutil.copytree(taught, tmp_path / "cache")
    fb.build(tmp_path / "cache", None, recipe(OwnModule()))
    cache = fb.open_cache(tmp_path / "cache")
    torch.manual_seed(0)
    with torch.inference_mode():
        out = TwoPaths()(torch.from_numpy(cache.read(range(len(cache)), ["clip_states"])["clip_states"])[..., :8])
    assert np.allclose(cache.read(range(len(cache)), ["own"])["own"][:, 2], out.amin(dim=1) * 2, atol=1e-5)


def test_a_part_that_was_not_run_is_an_error_that_names_sample_and_moment(tmp_path: Path, taught: Path) -> None:
    shutil.copytree(taught, tmp_path / "cache")
    with pytest.raises(ModelUnusable, match=r"hook on 'unused' .*did not fire for sample 'prompts.txt.*' at t = 0.1"):
        fb.build(tmp_path / "cache", None, recipe(OwnModule(part="unused")))


def _without_file(folder: Path) -> None:
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    (folder / "diffusion_pytorch_model.bin").write_bytes(b"a pickle")


def _renamed(folder: Path) -> None:
    (folder / "diffusion_pytorch_model.safetensors").rename(folder / "diffusion_pytorch_model.fp16.safetensors")


def _with(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "diffusion_pytorch_model.safetensors"
        state = load_file(path)
        change(state)
        save_file(state, path)

    return apply


def _cut_short(folder: Path) -> None:
    path = folder / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (_without_file, r"no .safetensors weights \(found: config.json, diffusion_pytorch_model.bin\)"),
    "variant": (
        _renamed,
        r"another name, '\w+.fp16.safetensors': expected 'model.safetensors', .*\nhint: link or rename",
    ),
    "lacking": (_with(lambda state: state.pop("conv_in.bias")), r"its weights lack conv_in.bias\nhint: pass"),
    "foreign": (_with(lambda state: state.update(extra=torch.ones(2))), "hold, and the model lacks, extra"),
    "shape": (_with(lambda state: state.update({"conv_in.bias": torch.ones(3)})), r"conv_in.bias"),
    "short": (_cut_short, "loading it fails: "),
    "nameless": (lambda folder: (folder / "config.json").unlink(), r"it has no config.json"),
    "nan": (
        _with(lambda state: state["conv_in.weight"].fill_(torch.nan)),
        r"it returns NaN or infinity in 'lune' at t = 0.1, as float32, for every one of the first \d samples",
    ),
}


@pytest.mark.parametrize(("harm", "said"), HARMS.values(), ids=HARMS)
def test_a_model_that_is_not_whole_is_an_error_and_never_zeros(
    tmp_path: Path, taught: Path, tiny_models: TinyModels, harm: Callable[[Path], None], said: str
) -> None:
    shutil.copytree(tiny_models.unet, tmp_path / "unet")
    shutil.copytree(taught, tmp_path / "cache")
    harm(tmp_path / "unet")
    with pytest.raises(ForebayError, match=said):
        fb.build(tmp_path / "cache", None, recipe(Lune(unet=str(tmp_path / "unet"))), layer="other")
    assert chunks_of(tmp_path / "cache", "other") == {}


UNUSABLE: dict[str, tuple[Callable[[TinyModels], Teacher], str]] = {
    "no part": (
        lambda models: Lune(unet=models.unet, submodule="class_embedding"),
        "has no submodule 'class_embedding'; it",
    ),
    "silent": (
        lambda models: Sol(unet=models.unet, most_positions=1),
        r"hook on '\*.attn1' .* did not fire for sample 'prompts.txt.*' at t = 0.1",
    ),
    "other kind": (lambda models: Lune(unet=models.vae), "its class is AutoencoderKL; supported denoisers are"),
    "not safe": (
        lambda models: Lune(unet=models.unet, weights=f"{models.unet}/config.json"),
        "single weights are a .safetensors file",
    ),
    "nowhere": (lambda models: T5(model="/nowhere/at/all"), "there is no such folder"),
    "not seen": (lambda models: T5(model="nowhere/at-all"), "the hub at .*nowhere/at-all.*offline mode"),
    "no class": (
        lambda models: Hook(
            model=models.t5, architecture="system", submodule="encoder", shape=(1,), arguments={"x": "clip_pooled_row"}
        ),
        "neither transformers nor diffusers has a model class 'system'",
    ),
}


@pytest.mark.parametrize(("teacher", "said"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_teacher_that_cannot_be_asked_says_why(
    tmp_path: Path,
    taught: Path,
    tiny_models: TinyModels,
    teacher: Callable[[TinyModels], Teacher],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(taught, tmp_path / "cache")
    with pytest.raises(ForebayError, match=said):
        fb.build(tmp_path / "cache", None, recipe(teacher(tiny_models)), layer="other")


def test_what_shapes_bits_is_recorded_in_the_generation(taught: Path) -> None:
    (versions,) = {tuple(sorted(one.items())) for one in fb.info(taught).versions if "diffusers" in one}
    assert dict(versions)["torch"] == torch.__version__
    assert dict(versions)["device"].startswith("cpu, 1 threads")


def test_a_device_that_is_none_is_refused(taught: Path, tmp_path: Path, tiny_models: TinyModels) -> None:
    shutil.copytree(taught, tmp_path / "cache")
    with pytest.raises(ModelUnusable, match="'mainframe' cannot be used: it is not a device"):
        fb.build(tmp_path / "cache", None, recipe(T5(model=tiny_models.t5, name="u"), device="mainframe"))


def test_the_bytes_of_the_document_come_out_of_the_shapes(tmp_path: Path) -> None:
    """3.56 GB for 10,000 samples: 1.31, 1.97, 15 MB, 256 MB, 0.8 MB, 12.8 MB."""
    configs = {
        "vae": {"latent_channels": 16, "block_out_channels": [128, 256, 512, 512]},
        "t5": {"d_model": 768},
        "clip": {"hidden_size": 768, "max_position_embeddings": 77},
        "unet": {"block_out_channels": [320, 640, 1280, 1280], "in_channels": 4, "sample_size": 64},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    folders = {name: str(tmp_path / name) for name in configs}
    recipes = fb.teachers.encodings(vae=folders["vae"], t5=folders["t5"], clip=folders["clip"])
    recipes["lune"] = fb.TeacherRecipe(teacher=Lune(unet=folders["unet"]))
    recipes["sol"] = fb.TeacherRecipe(teacher=Sol(unet=folders["unet"]))
    estimate = fb.teachers.estimate_teachers(recipes, 10_000)
    sizes = {size.column: size.bytes for size in estimate.columns}
    document = {
        "latents": 1_310_720_000,
        "t5_states": 1_966_080_000,
        "clip_pooled": 15_360_000,
        "lune": 256_000_000,
        "sol_stats": 800_000,
        "sol_spatial": 12_800_000,
    }
    assert {name: sizes[name] for name in document} == document
    assert sum(document.values()) == 3_561_760_000
    assert sum(size.row_bytes for size in estimate.columns if size.column in document) == 356_176
    assert sizes["t5_mask"] == 1_280_000
    assert (
        estimate.bytes
        == sum(sizes.values())
        + sum(size.bytes for size in estimate.columns if size.column == "t_buckets")
        - sizes["t_buckets"]
    )


def as_pipeline(models: TinyModels, folder: Path) -> Path:
    """The text encoder and its tokenizer as a pipeline of `diffusers` keeps them: in folders side by side."""
    shutil.copytree(models.clip, folder / "text_encoder")
    (folder / "tokenizer").mkdir()
    for path in (folder / "text_encoder").glob("tokenizer*"):
        path.rename(folder / "tokenizer" / path.name)
    return folder / "text_encoder"


def test_the_tokenizer_of_a_pipeline_is_found_beside_its_text_encoder(
    taught: Path, tiny_models: TinyModels, tmp_path: Path
) -> None:
    teacher = Clip(model=str(as_pipeline(tiny_models, tmp_path / "sd")))
    root = prompts_cache(tmp_path)
    fb.build(root, None, recipe(teacher))
    assert chunks_of(root, "clip").keys() == chunks_of(taught, "clip").keys()
    for name in ("clip_states", "clip_pooled"):
        read = [fb.open_cache(one).read(range(9), [name])[name] for one in (root, taught)]
        np.testing.assert_array_equal(*read)
    (tmp_path / "sd/tokenizer/tokenizer_config.json").write_text("{}")
    with pytest.raises(RecipeMismatch, match=r"clip/tokenizer/tokenizer_config\.json"):
        fb.build(root, None, recipe(teacher))


def test_what_a_later_layer_lacks_is_told_before_the_first_is_begun(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder = as_pipeline(tiny_models, tmp_path / "sd")
    shutil.rmtree(tmp_path / "sd/tokenizer")
    root = prompts_cache(tmp_path)
    teachers = (T5(model=tiny_models.t5, max_length=6), Clip(model=str(folder)))
    with pytest.raises(ModelUnusable, match=r"text_encoder.*it has no tokenizer"):
        fb.build_layers(root, {teacher.layer_name(): recipe(teacher) for teacher in teachers})
    assert not (layer_path(root, "t5")).exists()
