"""The document's names beyond its examples: what goes together, what is asked once, what is wrong usage."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from tests.tiny_models import TinyModels

import forebay as fb
from forebay.errors import ForebayError, TeacherUnusable
from forebay.teachers import T5, Clip, Latents, Lune, Sol
from forebay.torch.distill import TeacherRows
from forebay.torch.experts import (
    DatasetCache,
    EncodingCache,
    LuneFeatureCache,
    ModelZoo,
    SolFeatureCache,
    TrainerConfig,
    compute_lune_loss,
)

PROMPTS = ["a red cat", "the blue dog", "a house"]


@pytest.fixture
def zoo(tiny_models: TinyModels, tmp_path: Path, one_thread: None) -> ModelZoo:
    return ModelZoo(
        folder=tmp_path / "work",
        vae=Latents(vae=tiny_models.vae, size=16),
        t5=T5(model=tiny_models.t5, max_length=8),
        clip=Clip(model=tiny_models.clip),
        lune=Lune(unet=tiny_models.unet),
        sol=Sol(unet=tiny_models.unet),
        batch_size=2,
    )


def pictures(colour: str = "red") -> list[Image.Image]:
    return [Image.new("RGB", (20, 8 + number), colour) for number in range(len(PROMPTS))]


def test_teachers_that_were_asked_before_are_not_loaded_again(zoo: ModelZoo) -> None:
    first = LuneFeatureCache.build(zoo, PROMPTS)
    root = Path(first.cache.root)
    before = {path: path.read_bytes() for path in root.glob("layers/*/0*.safetensors")}
    reports = zoo.ask(str(root), "lune")
    assert {report.layer: report.made for report in reports} == {"clip": 0, "lune": 0}
    again = LuneFeatureCache.build(zoo, PROMPTS)
    assert again.cache.root == first.cache.root
    assert before == {path: path.read_bytes() for path in root.glob("layers/*/0*.safetensors")}


def test_images_by_path_give_the_cache_that_images_of_pillow_give(zoo: ModelZoo, tmp_path: Path) -> None:
    given = EncodingCache.build(zoo, pictures(), PROMPTS)
    files = []
    for number, image in enumerate(pictures()):
        files.append(tmp_path / f"{number}.png")
        image.save(files[-1])
    by_path = EncodingCache.build(zoo, files, PROMPTS)
    assert by_path.cache.root == given.cache.root
    assert given.latents.shape == (3, 4, 8, 8)
    assert len(given) == 3


def test_other_images_under_the_same_prompts_are_an_error(zoo: ModelZoo) -> None:
    EncodingCache.build(zoo, pictures(), PROMPTS)
    with pytest.raises(ForebayError, match="not what it was"):
        EncodingCache.build(zoo, pictures("blue"), PROMPTS)
    with pytest.raises(ValueError, match="2 images and 3 prompts"):
        EncodingCache.build(zoo, pictures()[:2], PROMPTS)


def test_parts_of_different_samples_do_not_make_a_data_set(zoo: ModelZoo) -> None:
    sol, other = SolFeatureCache.build(zoo, PROMPTS), LuneFeatureCache.build(zoo, ["a dog"])
    with pytest.raises(ValueError, match="of different samples"):
        DatasetCache(None, other, sol)
    with pytest.raises(ValueError, match="needs encodings, Lune or Sol"):
        DatasetCache(None)


def test_sol_from_attention_is_on_the_scale_of_its_map(zoo: ModelZoo, tmp_path: Path) -> None:
    sol = SolFeatureCache.build(zoo, PROMPTS, batch_timesteps=True)
    stats, maps = sol.get(torch.arange(3), torch.tensor([0.42, 0.05, 0.7]))
    assert ((stats.values >= 0) & (stats.values <= 1)).all()
    assert torch.allclose(maps.values.sum(dim=(1, 2)), torch.ones(3), atol=2e-3)  # stored as float16
    sol.save(tmp_path / "sol.pt")
    loaded = SolFeatureCache.load(tmp_path / "sol.pt")
    assert torch.equal(loaded.stats[torch.arange(3)], sol.stats[torch.arange(3)])
    assert fb.verify(tmp_path / "sol.pt").sound


def test_a_zoo_says_what_it_lacks_and_what_is_missing(zoo: ModelZoo, tmp_path: Path) -> None:
    assert "vae/config.json" in zoo.load_vae()
    assert zoo.load_sol()
    zoo.unload("vae")
    with pytest.raises(ValueError, match="known are: vae, t5, clip, lune, sol"):
        zoo.unload("moon")
    bare = ModelZoo(folder=tmp_path, lune=Lune(unet=str(tmp_path / "gone")))
    with pytest.raises(ValueError, match=r"ModelZoo\(t5=…\)"):
        bare.load_t5()
    with pytest.raises(TeacherUnusable, match="gone"):
        bare.load_lune()
    assert bare.load_sol() == {}  # the closed form has no files


def test_the_configuration_becomes_weights_and_dropout() -> None:
    config = TrainerConfig(lune_weight=0.2, lune_warmup_steps=10, sol_dropout=0.5, seed=3)
    assert [config.lune(step) for step in (0, 5, 100)] == pytest.approx([0, 0.1, 0.2])
    assert config.sol(2000) == 0.05
    assert (config.dropout("sol").rate, config.dropout("sol").seed, config.dropout("lune").rate) == (0.5, 3, 0.1)
    with pytest.raises(ValueError, match="known are: lune, sol"):
        config.dropout("moon")


def test_a_loss_takes_tensors_as_well_as_rows() -> None:
    predicted, target = torch.randn(3, 5), torch.randn(3, 5)
    rows = TeacherRows(target, torch.ones(3, dtype=torch.bool))
    assert compute_lune_loss(predicted, target) == compute_lune_loss(predicted, rows)
    assert compute_lune_loss(predicted, target, "huber") != compute_lune_loss(predicted, target, "mse")
