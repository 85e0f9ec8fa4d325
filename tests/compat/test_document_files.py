"""A `cache.pt` made literally by the document's code: loaded, checked, trained on, routed next to a built cache."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # the document's name
from tests.teachers.own_teachers import prompt_cache

import forebay as fb
from forebay.compat.pt_import import import_pt_cache
from forebay.compat.tinyflux import DatasetCache, MultiSourceCache, compute_lune_loss
from forebay.teachers import Batch, GeometricSol, Loaded, Output, Teacher, TeacherRecipe, check_alignment
from forebay.torch.distill import loss_weights

ROWS = 4


def document_file(path: Path, dim: int = 1280, t_buckets: torch.Tensor | None = None) -> Path:
    """Write what the document's own code writes, Sol's formula word for word."""
    t_buckets = torch.linspace(0.05, 0.95, 10) if t_buckets is None else t_buckets
    t_vals = t_buckets.float()
    locality = 1 - t_vals
    entropy = t_vals
    clustering = 0.5 - 0.3 * (t_vals - 0.5).abs()
    sparsity = 1 - t_vals
    y, x = torch.meshgrid(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij")
    center_dist = torch.sqrt(x**2 + y**2)
    t_weight = (1 - t_vals).view(-1, 1, 1)
    spatial = 1 - center_dist.unsqueeze(0) * t_weight
    spatial = spatial / spatial.sum(dim=[-2, -1], keepdim=True)
    stats = torch.stack([locality, entropy, clustering, sparsity], dim=-1)
    features = torch.randn(ROWS, len(t_vals), dim, generator=torch.Generator().manual_seed(0))
    content = {
        "name": "old",
        "lune": {"features": features.half(), "t_buckets": t_buckets},
        "sol": {
            "stats": stats.expand(ROWS, -1, -1).half(),
            "spatial": spatial.expand(ROWS, -1, -1, -1).half(),
            "t_buckets": t_buckets,
        },
    }
    torch.save(content, path)
    return path


class Moon(Teacher, frozen=True, kw_only=True, tag="moon"):
    """A teacher of the width of Lune."""

    timed = True
    dim: int = 1280
    time_direction: str = "t0_noise"
    name: str = "lune"

    def outputs(self) -> tuple[Output, ...]:
        return (Output("lune", (self.dim,)),)

    def load(self, device: str, dtype: str) -> Loaded:
        return lambda batch: {"lune": _drawn(batch, self.dim)}


def _drawn(batch: Batch, dim: int) -> object:
    return batch.noise((dim,))


def built_cache(folder: Path, teacher: Moon | None = None, **fields: object) -> fb.Cache:
    root = prompt_cache(folder)
    recipes = {
        "lune": TeacherRecipe(teacher=teacher or Moon(), **fields),
        "sol": TeacherRecipe(teacher=GeometricSol(), **fields),
    }
    fb.build_layers(root, recipes)
    return fb.open_cache(root)


def test_a_file_of_the_document_is_aligned_with_a_note_on_its_negative_maps(tmp_path: Path) -> None:
    data = DatasetCache.load(document_file(tmp_path / "cache.pt"))
    found = check_alignment(data.cache, expect="tinyflux")
    assert found.aligned
    (sol,) = (layer for layer in found.layers if layer.layer == "sol")
    assert sol.ranges["sol_spatial"][0] < 0
    assert "outside of the documented range 0 to 1" in sol.notes[0]
    command = [sys.executable, "-m", "forebay"]
    subprocess.run([*command, "import", tmp_path / "cache.pt", "--into", tmp_path / "cache", "-q"], check=True)
    told = subprocess.run(
        [*command, "verify", tmp_path / "cache", "--expect", "tinyflux"], check=True, capture_output=True, text=True
    )
    assert "documented" in " ".join(told.stdout.split())


def test_loss_weights_of_the_documents_maps_are_never_negative(tmp_path: Path) -> None:
    cache = MultiSourceCache()
    cache.add(DatasetCache.load(document_file(tmp_path / "cache.pt")), dataset_id=0)
    _, spatial = cache.get_sol(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0]), torch.tensor([0.05, 0.15, 0.25]))
    assert spatial is not None
    assert spatial.min() < 0
    weights = loss_weights(spatial)
    assert weights is not None
    assert weights.min() >= 0
    torch.testing.assert_close(weights.mean(dim=(1, 2)), torch.ones(3))


def test_the_documents_loss_code_runs_on_the_tensors_of_a_cache(tmp_path: Path) -> None:
    cache = MultiSourceCache()
    cache.add(DatasetCache.load(document_file(tmp_path / "cache.pt")), dataset_id=0)
    local_indices, dataset_ids = torch.tensor([0, 3]), torch.tensor([0, 0])
    timesteps = torch.tensor([0.42, 0.9])
    lune_pred = torch.randn(2, 1280, requires_grad=True)
    # From here on, word for word.
    lune_features = cache.get_lune(local_indices, dataset_ids, timesteps)
    lune_loss = 1 - F.cosine_similarity(lune_pred, lune_features).mean()
    # Up to here.
    lune_loss.backward()
    assert isinstance(lune_features, torch.Tensor)
    assert lune_features.shape == (2, 1280)
    assert lune_pred.grad is not None
    assert lune_loss.item() == pytest.approx(compute_lune_loss(lune_pred, lune_features).item(), rel=1e-5)
    sol_stats, sol_spatial = cache.get_sol(local_indices, dataset_ids, timesteps)
    assert (sol_stats.shape, sol_spatial.shape) == ((2, 4), (2, 8, 8))  # type: ignore[union-attr]


def test_rows_without_a_teacher_are_nan_masked_and_left_out_of_the_loss(tmp_path: Path) -> None:
    cache = MultiSourceCache()
    cache.add(DatasetCache.load(document_file(tmp_path / "cache.pt")), dataset_id=0)
    cache.add(fb.open_cache(prompt_cache(tmp_path / "plain")), dataset_id=1)
    where = (torch.tensor([1, 1]), torch.tensor([0, 1]), torch.tensor([0.5, 0.5]))
    lune = cache.get_lune(*where)
    assert lune is not None
    rows = cache.get("lune", *where)
    assert rows is not None
    assert rows["lune"].present.tolist() == [True, False]
    assert lune.isnan().all(dim=1).tolist() == [False, True]
    pred = torch.randn(2, 1280, requires_grad=True)
    loss = compute_lune_loss(pred, lune)
    torch.testing.assert_close(loss, 1 - F.cosine_similarity(pred[:1], lune[:1]).mean())
    loss.backward()
    assert pred.grad is not None
    assert pred.grad.isfinite().all()
    empty = MultiSourceCache()
    empty.add(fb.open_cache(prompt_cache(tmp_path / "other")), dataset_id=0)
    assert empty.get_lune([0], [0], [0.5]) is None
    assert empty.get_sol([0], [0], [0.5]) == (None, None)


def test_an_imported_data_set_is_routed_next_to_a_built_one_and_unknowns_are_stated_once(tmp_path: Path) -> None:
    built = built_cache(tmp_path / "built")
    old = DatasetCache.load(document_file(tmp_path / "cache.pt"))
    cache = MultiSourceCache()
    cache.add(built, dataset_id=0)
    with pytest.warns(UserWarning, match="does not record its teacher: 'lune', 'sol' of ") as warned:
        cache.add(old, dataset_id=1)
    assert len(warned) == 1
    rows, sets, times = torch.tensor([1, 2, 0]), torch.tensor([1, 0, 1]), torch.tensor([0.15, 0.42, 0.95])
    lune = cache.get_lune(rows, sets, times)
    assert lune is not None
    assert torch.equal(lune[0], old.lune.features[1, 1].float())  # type: ignore[union-attr]
    own = fb.teachers.features(built, "lune").at([2], [0.42])["lune"]
    torch.testing.assert_close(lune[1], torch.from_numpy(own[0]))


@pytest.mark.filterwarnings("ignore:an import does not record")
def test_the_formula_of_sol_is_routed_next_to_an_import_in_either_order(tmp_path: Path) -> None:
    built, old = built_cache(tmp_path / "built"), DatasetCache.load(document_file(tmp_path / "cache.pt"))
    for sources in ((old, built), (built, old)):
        cache = MultiSourceCache()
        for number, source in enumerate(sources):
            cache.add(source, dataset_id=number)
        stats, _ = cache.get_sol([0, 0], [0, 1], [0.42, 0.42])
        assert stats is not None
        torch.testing.assert_close(stats[0], stats[1], atol=1e-3, rtol=0)


def test_an_import_whose_time_runs_backwards_differs_from_the_formula_of_sol(tmp_path: Path) -> None:
    import_pt_cache(document_file(tmp_path / "cache.pt"), tmp_path / "old", time_direction="t0_data")
    cache = MultiSourceCache()
    cache.add(built_cache(tmp_path / "built", teacher=Moon(time_direction="t0_data")), dataset_id=0)
    with pytest.raises(ValueError, match=r"'sol' differs .*time direction is 't0_data' and 't0_noise'.*same teacher"):
        cache.add(DatasetCache.load(tmp_path / "old"), dataset_id=1)


@pytest.mark.parametrize(
    ("old", "built", "message"),
    [
        ({"dim": 640}, {}, r"column lune is \(640,\) and \(1280,\).*same teacher"),
        ({"t_buckets": torch.linspace(0.1, 0.9, 10)}, {}, "buckets is .*same teacher"),
        ({}, {"teacher": Moon(time_direction="t0_data")}, "time direction is 't0_noise' and 't0_data'.*same teacher"),
    ],
)
def test_an_import_that_differs_from_a_built_data_set_is_an_error_about_the_teacher(
    tmp_path: Path, old: dict[str, object], built: dict[str, object], message: str
) -> None:
    import_pt_cache(document_file(tmp_path / "cache.pt", **old), tmp_path / "old")  # type: ignore[arg-type]
    cache = MultiSourceCache()
    cache.add(built_cache(tmp_path / "built", **built), dataset_id=0)  # type: ignore[arg-type]
    with warnings.catch_warnings(), pytest.raises(ValueError, match=f"'lune' differs .*{message}"):
        cache.add(DatasetCache.load(tmp_path / "old"), dataset_id=1)
