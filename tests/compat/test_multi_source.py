"""Teacher layers of several data sets: routed by data set, joined in the order of the batch, compared when added."""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
import numpy as np
import pytest
import torch
from tests.helpers.tiny_models import TinyModels, save_tiny_models
from tests.torch.taught import prompts_cache

import forebay as fb
from forebay.columns import Column, Columns, Dtype, Ragged
from forebay.compat.tinyflux import MultiSourceCache, compute_lune_loss, compute_sol_loss
from forebay.recipe import Rows
from forebay.teachers import Clip, GeometricSol, Lune, TeacherRecipe
from forebay.teachers.recipe import T_BUCKETS

ROWS = 12
ABSENT = (3, 7)


class Spoken(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """A teacher's layer of noise by row, with two rows that it says nothing of."""

    kind: ClassVar[str] = "spoken"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("id",)

    dtype: Dtype = "float16"
    buckets: tuple[float, ...] = fb.teachers.BUCKETS
    dim: int = 6
    absent: tuple[int, ...] = ()

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="lune", dtype=self.dtype, shape=(len(self.buckets), self.dim)),)

    def constants(self) -> dict[str, np.ndarray]:
        return {T_BUCKETS: np.array(self.buckets)}

    def make(self, rows: Columns) -> Rows:
        ids = rows["id"]
        assert isinstance(ids, Ragged)
        shape = (len(self.buckets), self.dim)
        made = [np.random.default_rng([*ids[row]]).standard_normal(shape) for row in range(len(ids))]
        numbers = [int(ids[row].tobytes().decode().rpartition("#")[2]) for row in range(len(ids))]
        present = np.array([number // 2 not in self.absent for number in numbers])
        return Rows({"lune": np.array(made).astype(self.columns()[0].array_dtype)}, present=present)


class Numbers(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """Lines of two bytes, three in a chunk."""

    kind: ClassVar[str] = "numbers"
    revision: ClassVar[int] = 1
    sample_ids: ClassVar[str] = "id"

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="id", dtype="uint8", ragged=True),)

    def chunk_target(self) -> fb.ChunkTarget:
        return fb.ChunkTarget(rows=3)

    def make(self, samples: Iterable[fb.Sample]) -> Rows:
        return Rows({"id": Ragged.of_bytes([f"#{2 * int(sample.data)}".encode() for sample in samples])})


def taught(folder: Path, *layers: tuple[str, object]) -> fb.Cache:
    """A cache of twelve rows with some layers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numbers").write_text("".join(f"{number}\n" for number in range(ROWS)))
    fb.build(folder / "cache", fb.sources.lines(folder / "numbers"), Numbers(), workers=0)
    for name, recipe in layers:
        fb.build(folder / "cache", None, recipe, layer=name, workers=0)  # type: ignore[arg-type]
    return fb.open_cache(folder / "cache")


def test_samples_of_several_data_sets_are_looked_up_in_their_own_cache(tmp_path: Path) -> None:
    sol = TeacherRecipe(teacher=GeometricSol())
    both = taught(tmp_path / "both", ("lune", Spoken(absent=ABSENT)), ("sol", sol))
    only_lune = taught(tmp_path / "lune", ("lune", Spoken()))
    neither = taught(tmp_path / "neither")
    multi = MultiSourceCache()
    for number, cache in ((0, both), (5, only_lune), (2, neither)):
        multi.add(cache, dataset_id=number)
    local, ids = torch.tensor([3, 1, 0, 2, 11, 1]), torch.tensor([0, 5, 2, 0, 5, 0])
    moments = torch.tensor([0.1, 0.2, 0.3, 0.42, 0.5, 0.95])
    lune = multi.get_lune(local, ids, moments)
    assert lune is not None
    assert lune.isnan().any(dim=1).tolist() == [True, False, True, False, False, False]
    for row in (1, 3, 4, 5):
        own = {0: both, 5: only_lune}[int(ids[row])]
        expected = fb.teachers.features(own, "lune").at(local[[row]], moments[[row]])["lune"]
        assert torch.equal(lune[row], torch.from_numpy(expected[0]))
    assert lune[[0, 2]].isnan().all()
    with pytest.raises(ValueError, match="one per sample: 6"):
        multi.get_lune(local, ids, moments[:3])
    with pytest.raises(TypeError, match="rows must be a list of integers"):  # a mask is no list of rows
        multi.get_lune([True, False], [0, 0], 0.5)
    torch.set_default_dtype(torch.float64)
    try:
        again = multi.get_lune(local, ids, moments)
    finally:
        torch.set_default_dtype(torch.float32)
    assert again is not None
    assert again.dtype == torch.float32
    stats, maps = multi.get_sol(local, ids, moments)
    assert stats is not None
    assert maps is not None
    assert stats.isnan().any(dim=1).tolist() == [False, True, True, False, True, False]
    assert torch.allclose(maps[[0, 3, 5]].sum(dim=(1, 2)), torch.ones(3), atol=1e-6)
    assert stats[3].tolist() == pytest.approx([0.58, 0.42, 0.3 * 0.455 + 0.7 * 0.485, 0.58], abs=1e-6)
    loss = compute_lune_loss(torch.randn(6, 6), lune) + compute_sol_loss(
        torch.rand(6, 4), torch.rand(6, 8, 8), stats, maps
    )
    assert loss.isfinite()


def test_where_no_data_set_has_a_teacher_there_is_none(tmp_path: Path) -> None:
    multi = MultiSourceCache()
    multi.add(taught(tmp_path), dataset_id=0)
    assert multi.get_lune([0, 1], [0, 0], [0.5, 0.5]) is None
    assert multi.get_sol([0, 1], [0, 0], [0.5, 0.5]) == (None, None)
    with pytest.raises(KeyError, match="no cache was added for data set 4"):
        multi.get_lune([0], [4], [0.5])
    with pytest.raises(KeyError, match=r"no cache was added for data set 0\.5"):
        multi.get_lune([0], [0.5], 0.5)
    with pytest.raises(ValueError, match="one local index and one dataset id per sample"):
        multi.get_lune([0, 1], [0, 0, 0], 0.5)
    with pytest.raises(ValueError, match="dataset_id 0 is already"):
        multi.add(fb.open_cache(tmp_path / "cache"), dataset_id=0)


def test_teachers_of_other_shapes_do_not_go_together(tmp_path: Path) -> None:
    multi = MultiSourceCache()
    multi.add(taught(tmp_path / "a", ("lune", Spoken())), dataset_id=0)
    with pytest.raises(ValueError, match=r"column lune is .*5.* all data sets need the same teacher"):
        multi.add(taught(tmp_path / "b", ("lune", Spoken(dim=5))), dataset_id=1)
    with pytest.raises(ValueError, match="float32"):
        multi.add(taught(tmp_path / "c", ("lune", Spoken(dtype="float32"))), dataset_id=1)


HOW = {"batch_size": 4, "stored": "float32"}


def taught_by_models(
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
@pytest.mark.usefixtures("one_thread")
def test_other_weights_buckets_directions_and_types_are_refused_with_what_differs(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    sources = MultiSourceCache()
    sources.add(taught_by_models(tmp_path / "a", tiny_models, ("red cat",)), dataset_id=0)
    sources.add(taught_by_models(tmp_path / "same", tiny_models, ("a dog",), batch_size=2), dataset_id=1)
    with pytest.raises(ValueError, match=r"'moon' differs .* buckets is"):
        sources.add(taught_by_models(tmp_path / "b", tiny_models, ("red cat",), buckets=(0.1, 0.9)), dataset_id=2)
    with pytest.raises(ValueError, match=r"'moon' differs .*direction.*t0_data"):
        sources.add(taught_by_models(tmp_path / "e", tiny_models, ("red cat",), direction="t0_data"), dataset_id=2)
    with pytest.raises(ValueError, match=r"types is .*float16"):
        sources.add(taught_by_models(tmp_path / "c", tiny_models, ("red cat",), stored="float16"), dataset_id=2)
    other = save_tiny_models(tmp_path / "models", seed=9)
    with pytest.raises(ValueError, match=r"'clip' differs .* weights is"):
        sources.add(taught_by_models(tmp_path / "d", other, ("red cat",)), dataset_id=2)
