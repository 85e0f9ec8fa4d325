"""The document's names beyond its examples: the building code of `examples/tinyflux_build.py`, settings and losses."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.helpers.tiny_models import TinyModels

import forebay as fb
from forebay.compat.tinyflux import DatasetCache, EncodingCache
from forebay.errors import ModelUnusable
from forebay.teachers import T5, Clip, GeometricSol, Latents, Lune, Sol

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
PROMPTS = ["a red cat", "the blue dog", "a house"]
BUILDING = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "tinyflux_build.py"))
ModelZoo, Encodings = BUILDING["ModelZoo"], BUILDING["EncodingCache"]
LuneFeatures, SolFeatures = BUILDING["LuneFeatureCache"], BUILDING["SolFeatureCache"]


@pytest.fixture(scope="module")
def zoo(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return zoo_in(tmp_path_factory.mktemp("work"), tiny_models)


@pytest.fixture(scope="module")
def encodings(zoo: Any) -> EncodingCache:
    """Built once; further parts of the same prompts are layers of the same cache."""
    built: EncodingCache = Encodings.build(zoo, pictures(), PROMPTS)
    return built


def zoo_in(folder: Path, models: TinyModels, **others: object) -> Any:
    parts = {
        "vae": Latents(vae=models.vae, size=16),
        "t5": T5(model=models.t5, max_length=8),
        "clip": Clip(model=models.clip),
        "lune": Lune(unet=models.unet),
        "sol": Sol(unet=models.unet),
    }
    return ModelZoo(**{"folder": folder, **parts, "batch_size": 2, **others})


def pictures(color: str = "red") -> list[Image.Image]:
    return [Image.new("RGB", (20, 8 + number), color) for number in range(len(PROMPTS))]


def test_a_part_built_again_loads_no_model(zoo: Any, encodings: EncodingCache) -> None:
    first = LuneFeatures.build(zoo, PROMPTS)
    reports = zoo.build_layers(first.cache.root, "lune")
    assert {report.layer: report.built for report in reports} == {"clip": 0, "lune": 0}
    assert LuneFeatures.build(zoo, PROMPTS).cache.root == first.cache.root == encodings.cache.root


def test_paths_and_pillow_images_make_the_same_cache(zoo: Any, encodings: EncodingCache, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(len(PROMPTS))]
    for path, image in zip(paths, pictures(), strict=True):
        image.save(path)
    assert Encodings.build(zoo, paths, PROMPTS).cache.root == encodings.cache.root
    assert encodings.latents.shape == (3, 4, 8, 8)
    assert encodings.latents.dtype == encodings.latents[:1].dtype == torch.float16
    assert torch.equal(encodings.latents[1:], encodings.latents[[1, 2]])
    assert len(encodings) == 3
    with pytest.raises(AttributeError, match="has latents, t5_embeds, t5_mask, clip_pooled"):
        encodings.features  # noqa: B018


def test_other_images_for_the_same_prompts_are_an_error(zoo: Any, encodings: EncodingCache) -> None:
    with pytest.raises(ValueError, match="has another image 0"):
        Encodings.build(zoo, pictures("blue"), PROMPTS)
    with pytest.raises(ValueError, match="2 images and 3 prompts"):
        Encodings.build(zoo, pictures()[:2], PROMPTS)
    assert fb.verify(encodings.cache.root).sound


def test_parts_of_different_samples_or_settings_do_not_make_a_data_set(tiny_models: TinyModels, tmp_path: Path) -> None:
    plain = zoo_in(tmp_path, tiny_models, sol=GeometricSol())
    one, other = SolFeatures.build(plain, PROMPTS), SolFeatures.build(plain, ["a dog"])
    with pytest.raises(ValueError, match="parts of different caches"):
        DatasetCache(EncodingCache(other.cache), None, one)
    with pytest.raises(ValueError, match="got no parts"):
        DatasetCache(None)
    with pytest.raises(ValueError, match="encode images before other parts"):
        Encodings.build(plain, pictures(), PROMPTS)
    with pytest.raises(ValueError, match="one or more strings"):
        SolFeatures.build(plain, [])


def test_sol_from_attention_is_on_the_scale_of_its_map(zoo: Any, encodings: EncodingCache) -> None:
    sol = SolFeatures.build(zoo, PROMPTS, batch_timesteps=True)
    stats, maps = sol.get(torch.arange(3), torch.tensor([0.42, 0.05, 0.7]))
    assert ((stats >= 0) & (stats <= 1)).all()
    assert torch.allclose(maps.sum(dim=(1, 2)), torch.ones(3), atol=2e-3)  # stored as float16


def test_a_zoo_checks_the_files_of_its_models(zoo: Any, tmp_path: Path) -> None:
    assert "vae/config.json" in zoo.load_vae()
    assert zoo.load_sol()
    zoo.unload("vae")
    bare = ModelZoo(folder=tmp_path, lune=Lune(unet=str(tmp_path / "gone")))
    with pytest.raises(ValueError, match=r"ModelZoo\(t5=…\)"):
        bare.load_t5()
    with pytest.raises(ModelUnusable, match="gone"):
        bare.load_lune()
    assert bare.load_sol() == {}  # the formula has no files
