"""Any layer of several data sets: routed by data set, joined in the order of the batch, compared when it is added."""

from pathlib import Path
from typing import Literal

import pytest
from tests.helpers.tiny_models import TinyModels, save_tiny_models
from tests.torch.taught import prompts_cache

import forebay as fb
from forebay.compat.multi_source import MultiSourceCache
from forebay.teachers import Clip, Lune, TeacherRecipe

pytestmark = pytest.mark.usefixtures("one_thread")
HOW = {"batch_size": 4, "stored": "float32"}


def cache_of(
    folder: Path,
    models: TinyModels,
    prompts: tuple[str, ...],
    lune: bool = True,
    direction: Literal["t0_noise", "t0_data"] = "t0_noise",
    **timed: object,
) -> fb.Cache:
    root = prompts_cache(folder, prompts)
    recipes = {"clip": TeacherRecipe(teacher=Clip(model=models.clip), **HOW)}
    if lune:
        teacher = Lune(unet=models.unet, name="moon", time_direction=direction)
        recipes["moon"] = TeacherRecipe(teacher=teacher, **{"buckets": (0.2, 0.8), **HOW, **timed})
    fb.build_layers(root, recipes)
    return fb.open_cache(root, layers=list(recipes))


@pytest.mark.slow
def test_other_weights_buckets_directions_and_types_are_refused_with_what_differs(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    sources = MultiSourceCache()
    sources.add(cache_of(tmp_path / "a", tiny_models, ("red cat",)), dataset_id=0)
    sources.add(cache_of(tmp_path / "same", tiny_models, ("a dog",), batch_size=2), dataset_id=1)
    with pytest.raises(ValueError, match=r"'moon' differs .* buckets is"):
        sources.add(cache_of(tmp_path / "b", tiny_models, ("red cat",), buckets=(0.1, 0.9)), dataset_id=2)
    with pytest.raises(ValueError, match=r"'moon' differs .*direction.*t0_data"):
        sources.add(cache_of(tmp_path / "e", tiny_models, ("red cat",), direction="t0_data"), dataset_id=2)
    with pytest.raises(ValueError, match=r"column moon is .*float16"):
        sources.add(cache_of(tmp_path / "c", tiny_models, ("red cat",), stored="float16"), dataset_id=2)
    other = save_tiny_models(tmp_path / "models", seed=9)
    with pytest.raises(ValueError, match=r"'clip' differs .* weights is"):
        sources.add(cache_of(tmp_path / "d", other, ("red cat",)), dataset_id=2)
