"""Features at any moment, as tensors: equal to numpy's, exact at nodes, absent where the teacher is; many data sets."""

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import torch

import forebay as fb
from forebay.columns import Column, Columns, Dtype, Ragged
from forebay.compat.tinyflux import MultiSourceCache, compute_lune_loss, compute_sol_loss
from forebay.recipe import Rows
from forebay.teachers import GeometricSol, TeacherRecipe
from forebay.teachers.recipe import T_BUCKETS
from forebay.torch import features
from forebay.torch.distill import TeacherDropout

ROWS = 12
UNEVEN = (0.0, 0.1, 0.4, 0.45, 1.0)
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("buckets", [fb.teachers.BUCKETS, UNEVEN, (0.5,)], ids=len)
def test_tensors_are_what_numpy_gives_and_exact_at_every_node(
    tmp_path: Path, dtype: Dtype, buckets: tuple[float, ...]
) -> None:
    cache = taught(tmp_path, ("lune", Spoken(dtype=dtype, buckets=buckets)))
    lune, plain = features(cache, "lune"), fb.teachers.features(cache, "lune")
    rows = torch.arange(ROWS).repeat(3)
    moments = torch.rand(len(rows), generator=torch.Generator().manual_seed(0))
    found = lune.at(rows, moments)["lune"]
    assert found.values.dtype == torch.float32
    assert torch.allclose(found.values, torch.from_numpy(plain.at(rows.numpy(), moments.numpy())["lune"]), atol=1e-6)
    stored = cache.read(rows[:ROWS].numpy(), ["lune"])["lune"].astype(np.float32)  # type: ignore[union-attr]
    for number, node in enumerate(buckets):
        for type_ in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            at_node = lune.at(rows[:ROWS], torch.full((ROWS,), node, dtype=type_))["lune"].values
            assert torch.equal(at_node, torch.from_numpy(stored[:, number])), (node, type_)


def test_a_document_of_the_ten_buckets_reads_as_it_says(tmp_path: Path) -> None:
    cache = taught(tmp_path, ("lune", Spoken(dtype="float32")))
    lune = features(cache, "lune")
    stored = torch.from_numpy(cache.read([5], ["lune"])["lune"])[0]  # type: ignore[arg-type]
    at = {t: lune.at([5], t)["lune"].values[0] for t in (0.0, 0.15, 0.42, 0.99)}
    assert torch.equal(at[0.0], stored[0])
    assert torch.equal(at[0.15], stored[1])
    assert torch.equal(at[0.99], stored[9])
    assert torch.allclose(at[0.42], 0.3 * stored[3] + 0.7 * stored[4], atol=1e-5)
    assert torch.equal(lune.at([5, 5], torch.linspace(0.05, 0.95, 10)[[2, 8]])["lune"].values, stored[[2, 8]])


def test_rows_the_teacher_said_nothing_of_are_absent(tmp_path: Path) -> None:
    cache = taught(tmp_path, ("lune", Spoken(absent=ABSENT)))
    found = features(cache, "lune").at(np.arange(ROWS), 0.3)["lune"]
    assert (~found.present).nonzero().flatten().tolist() == list(ABSENT)
    assert found.values[list(ABSENT)].isnan().all()
    assert found.values[found.present].isfinite().all()
    plain = fb.teachers.features(cache, "lune").at(np.arange(ROWS), 0.3)
    np.testing.assert_array_equal(np.isnan(plain["lune"]).any(axis=1), ~plain["lune.present"])
    alone = features(cache, "lune").at([4, 5], 0.3)["lune"]
    assert alone.present.all()


def test_features_come_on_the_device_asked_for_without_gradients(tmp_path: Path) -> None:
    cache = taught(tmp_path, ("lune", Spoken(absent=ABSENT)))
    multi = MultiSourceCache(device="meta")  # the one further device that is everywhere
    multi.add(cache, dataset_id=0)
    for rows in ([4, 5], [3, 4]):
        moments = torch.full((2,), 0.3, requires_grad=True)
        for found in (features(cache, "lune", "meta").at(rows, moments), multi.get("lune", rows, 0, moments)):
            assert found is not None
            timed = found["lune"]
            assert timed.values.device.type == timed.present.device.type == "meta"
            assert timed.values.shape == (2, 6)
            assert not timed.values.requires_grad


def test_features_show_their_layer_and_device(tmp_path: Path) -> None:
    found = features(taught(tmp_path, ("lune", Spoken())), "lune", "meta")
    assert repr(found) == f"<Features of layer 'lune' in '{found.numpy.cache.root}', 10 buckets: lune, on meta>"
    assert found._repr_html_() == found.numpy._repr_html_()


def test_moments_and_rows_that_do_not_go_together_are_an_error(tmp_path: Path) -> None:
    lune = features(taught(tmp_path, ("lune", Spoken())), "lune")
    with pytest.raises(ValueError, match="t must be one number or one per row: 2"):
        lune.at([0, 1], [0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match=r"t\[1\] is not a number"):
        lune.at([0, 1], [0.1, float("nan")])
    with pytest.raises(IndexError, match=r"there is no row 12; .* has 12 rows"):
        lune.at([12], 0.5)
    assert lune.at([], [])["lune"].values.shape == (0, 6)


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
        expected = features(own, "lune").at(local[[row]], moments[[row]])["lune"]
        assert torch.allclose(lune[row], expected.values[0], rtol=0, atol=1e-6)
    assert lune[[0, 2]].isnan().all()
    with pytest.raises(ValueError, match="one per sample: 6"):
        multi.get_lune(local, ids, moments[:3])
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
    with pytest.raises(TypeError, match="local_indices must be whole numbers"):  # a mask is no list of rows
        multi.get_lune([True, False], [0, 0], 0.5)
    with pytest.raises(TypeError, match="dataset_ids must be whole numbers"):
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


def test_dropout_goes_by_the_permanent_names_of_samples(tmp_path: Path) -> None:
    multi = MultiSourceCache()
    for number in (0, 1):
        multi.add(taught(tmp_path / str(number), ("lune", Spoken())), dataset_id=number)
    local, ids = np.arange(ROWS).repeat(2), np.tile([0, 1], ROWS)
    keys = multi.sample_keys(local, ids)
    assert keys[:2].tolist() == [0, 0]
    assert keys[-1] == (3 << 32) + 2  # the third row of chunk 3
    kept = TeacherDropout(rate=0.5).keep("lune", 9, keys, ids)
    one_by_one = [
        TeacherDropout(rate=0.5).keep("lune", 9, [key], one).item() for key, one in zip(keys, ids, strict=True)
    ]
    assert kept.tolist() == one_by_one
