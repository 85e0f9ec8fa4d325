"""The document's names beyond its examples: what goes together, what is asked once, what is wrong usage."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.helpers.tiny_models import TinyModels

import forebay as fb
from forebay.compat.tinyflux import (
    DatasetCache,
    EncodingCache,
    LuneFeatureCache,
    ModelZoo,
    SolFeatureCache,
    TrainerConfig,
    compute_lune_loss,
    compute_sol_loss,
)
from forebay.errors import ModelUnusable
from forebay.teachers import T5, Clip, GeometricSol, Latents, Lune, Sol
from forebay.torch.distill import TeacherRows

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ["a red cat", "the blue dog", "a house"]


@pytest.fixture(scope="module")
def zoo(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> ModelZoo:
    return zoo_in(tmp_path_factory.mktemp("work"), tiny_models)


@pytest.fixture(scope="module")
def encodings(zoo: ModelZoo) -> EncodingCache:
    """Built once; further parts of the same prompts are layers of the same cache."""
    return EncodingCache.build(zoo, pictures(), PROMPTS)


def zoo_in(folder: Path, models: TinyModels, **others: object) -> ModelZoo:
    made = {
        "vae": Latents(vae=models.vae, size=16),
        "t5": T5(model=models.t5, max_length=8),
        "clip": Clip(model=models.clip),
        "lune": Lune(unet=models.unet),
        "sol": Sol(unet=models.unet),
    }
    return ModelZoo(**{"folder": folder, **made, "batch_size": 2, **others})  # type: ignore[arg-type]


def pictures(colour: str = "red") -> list[Image.Image]:
    return [Image.new("RGB", (20, 8 + number), colour) for number in range(len(PROMPTS))]


def files_of(folder: Path, suffix: str) -> list[Path]:
    paths = [folder / f"{number}{suffix}" for number in range(len(PROMPTS))]
    for path, image in zip(paths, pictures(), strict=True):
        image.save(path, format="JPEG" if suffix == ".jpg" else "PNG")
    return paths


def chunks_of(cache: fb.Cache) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(cache.root).glob("layers/*/0*.safetensors")}


def test_teachers_that_were_asked_before_are_not_loaded_again(zoo: ModelZoo, encodings: EncodingCache) -> None:
    first = LuneFeatureCache.build(zoo, PROMPTS)
    before = chunks_of(first.cache)
    reports = zoo.build_layers(first.cache.root, "lune")
    assert {report.layer: report.made for report in reports} == {"clip": 0, "lune": 0}
    again = LuneFeatureCache.build(zoo, PROMPTS)
    assert again.cache.root == first.cache.root == encodings.cache.root
    assert before == chunks_of(again.cache)


def test_images_by_path_give_the_cache_that_images_of_pillow_give(
    zoo: ModelZoo, encodings: EncodingCache, tmp_path: Path
) -> None:
    by_path = EncodingCache.build(zoo, files_of(tmp_path, ".png"), PROMPTS)
    assert by_path.cache.root == encodings.cache.root
    assert by_path.cache.generation.number >= encodings.cache.generation.number
    assert encodings.latents.shape == (3, 4, 8, 8)
    assert encodings.latents.dtype == encodings.latents[:1].dtype == torch.float16
    assert torch.equal(encodings.latents[1:], encodings.get([1, 2])["latents"])
    assert torch.equal(encodings.t5_embeds[2], encodings.get([2])["t5_embeds"][0])
    assert len(encodings) == 3


def test_other_images_under_the_same_prompts_are_an_error_and_leave_the_cache_as_it_was(
    zoo: ModelZoo, encodings: EncodingCache, tmp_path: Path
) -> None:
    for others in (pictures("blue"), files_of(tmp_path, ".jpg")):
        with pytest.raises(ValueError, match=r"image 0 is not the one that .* was begun with"):
            EncodingCache.build(zoo, others, PROMPTS)
        assert fb.verify(encodings.cache.root).sound
    with pytest.raises(ValueError, match="2 images and 3 prompts"):
        EncodingCache.build(zoo, pictures()[:2], PROMPTS)


def test_a_list_that_never_became_a_cache_leaves_no_image_behind(tiny_models: TinyModels, tmp_path: Path) -> None:
    only_images = zoo_in(tmp_path / "work", tiny_models, t5=None, clip=None)
    with pytest.raises(FileNotFoundError):
        EncodingCache.build(only_images, [*files_of(tmp_path, ".jpg")[:2], tmp_path / "gone.jpg"], PROMPTS)
    built = EncodingCache.build(only_images, pictures(), PROMPTS)
    assert len(built) == 3
    assert list(built.get([0])) == ["latents"]  # what the zoo has a model for


@pytest.mark.parametrize("prompts", ["a cat", []])
def test_what_is_no_list_of_prompts_or_images_is_an_error(zoo: ModelZoo, tmp_path: Path, prompts: list[str]) -> None:
    with pytest.raises(ValueError, match="one or more strings"):
        SolFeatureCache.build(zoo, prompts)
    # A file that no source of images would find would leave rows out, and move those after it.
    with pytest.raises(ValueError, match="must end in one of"):
        EncodingCache.build(zoo, files_of(tmp_path, ""), ["a", "b", "c"])


def test_parts_of_different_samples_or_settings_do_not_make_a_data_set(tiny_models: TinyModels, tmp_path: Path) -> None:
    plain = zoo_in(tmp_path, tiny_models, sol=GeometricSol())
    one, other = SolFeatureCache.build(plain, PROMPTS), SolFeatureCache.build(plain, ["a dog"])
    with pytest.raises(ValueError, match="of different caches"):
        DatasetCache(EncodingCache(other.cache), None, one)
    with pytest.raises(ValueError, match="needs encodings, Lune or Sol"):
        DatasetCache(None)
    with pytest.raises(ValueError, match="encode images before other parts"):
        EncodingCache.build(plain, pictures(), PROMPTS)


def test_sol_from_attention_is_on_the_scale_of_its_map(zoo: ModelZoo, encodings: EncodingCache) -> None:
    sol = SolFeatureCache.build(zoo, PROMPTS, batch_timesteps=True)
    stats, maps = sol.get(torch.arange(3), torch.tensor([0.42, 0.05, 0.7]))
    assert ((stats >= 0) & (stats <= 1)).all()
    assert torch.allclose(maps.sum(dim=(1, 2)), torch.ones(3), atol=2e-3)  # stored as float16


def test_a_zoo_says_what_it_lacks_and_what_is_missing(zoo: ModelZoo, tmp_path: Path) -> None:
    assert "vae/config.json" in zoo.load_vae()
    assert zoo.load_sol()
    zoo.unload("vae")
    bare = ModelZoo(folder=tmp_path, lune=Lune(unet=str(tmp_path / "gone")))
    with pytest.raises(ValueError, match=r"ModelZoo\(t5=…\)"):
        bare.load_t5()
    with pytest.raises(ModelUnusable, match="gone"):
        bare.load_lune()
    assert bare.load_sol() == {}  # the closed form has no files


def test_the_configuration_becomes_weights_and_dropout() -> None:
    config = TrainerConfig(lune_weight=0.2, lune_warmup_steps=10, sol_dropout=0.5, seed=3)
    assert [config.lune(step) for step in (0, 5, 100)] == pytest.approx([0, 0.1, 0.2])
    assert config.sol(2000) == 0.05
    assert (config.dropout("sol").rate, config.dropout("sol").seed, config.dropout("lune").rate) == (0.5, 3, 0.1)


def test_a_loss_takes_tensors_as_well_as_rows() -> None:
    predicted, target = torch.randn(3, 5), torch.randn(3, 5)
    rows = TeacherRows(target, torch.ones(3, dtype=torch.bool))
    assert compute_lune_loss(predicted, target) == compute_lune_loss(predicted, rows)
    assert compute_lune_loss(predicted, target, "huber") != compute_lune_loss(predicted, target, "mse")


def test_each_part_of_sol_counts_where_it_is_present() -> None:
    there = torch.ones(2, dtype=torch.bool)
    stats, maps = TeacherRows(torch.rand(2, 4), there), TeacherRows(torch.rand(2, 8, 8), there)
    only_first = maps.where(torch.tensor([True, False]))
    loss = compute_sol_loss(stats.values + 1, maps.values + 2, stats, only_first)
    assert loss.item() == pytest.approx(1 + 4, rel=1e-5)
