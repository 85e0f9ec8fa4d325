"""The fields of an SDXL, UNets that are refused, and noise shared by buckets."""

from pathlib import Path

import pytest
from tests.helpers import tiny_pipelines
from tests.helpers.tiny_models import TinyModels
from tests.helpers.tiny_pipelines import saved, sdxl_unet

import forebay as fb
from forebay.errors import ModelUnusable
from forebay.teachers import Clip, Latents, Lune, Sol, TeacherRecipe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("sdxl"), tiny_pipelines.sdxl)


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


def test_a_whole_sdxl_pipeline_names_the_same_teachers(sdxl: Path) -> None:
    """Those whose numbers are compared with its own; with images, time ids have their size."""
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

    with pytest.raises(ModelUnusable, match=r"SDXL kind\nhint: pass pooled="):
        load(unet=f"{sdxl}/unet")
    with pytest.raises(ModelUnusable, match="leave out pooled"):
        load(unet=tiny_models.unet, pooled="clip_pooled")
    with pytest.raises(ModelUnusable, match="pass projected=True"):
        Clip(model=f"{sdxl}/text_encoder_2").load("cpu", "float32")
    kinds = {"addition_embed_type": None, "class_embed_type": "timestep"}
    sdxl_unet(**kinds).save_pretrained(tmp_path / "classes")
    with pytest.raises(ModelUnusable, match="class_embed_type is timestep; such UNets are not supported"):
        load(unet=str(tmp_path / "classes"))
    sdxl_unet(addition_embed_type=None, only_cross_attention=True).save_pretrained(tmp_path / "crossed")
    with pytest.raises(ModelUnusable, match="no map for Sol"):
        Sol(unet=str(tmp_path / "crossed")).load("cpu", "float32")
    sdxl_unet(addition_embed_type=None, only_cross_attention=[False, True]).save_pretrained(tmp_path / "half")
    with pytest.raises(ModelUnusable, match="no map for Sol"):
        Sol(unet=str(tmp_path / "half")).load("cpu", "float32")
    sdxl_unet(addition_embed_type=None, only_cross_attention=[False, False]).save_pretrained(tmp_path / "plain")
    assert Sol(unet=str(tmp_path / "plain")).load("cpu", "float32")
