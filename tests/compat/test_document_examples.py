"""The code examples of the document on teacher caches, run word for word on caches of ours.

Names that an example takes from its surroundings (`zoo`, `images`, `model` …) are given to it, as the reader would have
them. `INVALID` lists the examples that are no code, and why.
"""

import random
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.helpers.tiny_models import TinyModels, tiny_unet
from tests.torch.taught import plain_lune
from torch import Tensor, nn

import forebay as fb
from forebay.compat import tinyflux
from forebay.teachers import T5, Clip, Latents, Lune
from forebay.torch.distill import spatial_weights

PREDICTORS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "teacher_predictors.py"))
BUILDING = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "tinyflux_build.py"))
ModelZoo = BUILDING["ModelZoo"]
LunePredictor, SolPrior, embed_times = (PREDICTORS[name] for name in ("LunePredictor", "SolPrior", "embed_times"))

EXAMPLES = Path(__file__).with_name("expert_cache_examples.txt")
BLOCK = re.compile(r"^## (\d+)\. ([^\n]*)\n\n```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
INVALID = {
    4: "x² + y² is no Python; the closed form itself is held against the figures in tests/teachers/test_geometric.py",
    7: "Tensor[N, 16, 64, 64] is a notation of shapes: what is saved, not what is run",
}
PROMPTS = ["a red cat", "a blue dog on the hill", "a red cat", "two house"]


class Student(nn.Module):
    """What the document leaves to its reader: a model that takes teachers' words and says its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lune_predictor = LunePredictor(8, 4, feature_dim=dim, hidden_dim=8, signal_dim=4)
        self.sol_prior = SolPrior(8, 4, hidden_dim=8)

    def forward(
        self,
        _: object,
        lune_features: Tensor | None = None,
        sol_stats: Tensor | None = None,
        sol_spatial: Tensor | None = None,
        return_expert_pred: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert return_expert_pred
        time, text = embed_times(torch.rand(3), 8), torch.randn(3, 4)
        lune, sol = self.lune_predictor(time, text, lune_features), self.sol_prior(time, text, sol_stats, sol_spatial)
        info = {"lune_pred": lune.predicted}
        return lune.signal, info | {"sol_stats_pred": sol.stats_predicted, "sol_spatial_pred": sol.spatial_predicted}


@pytest.fixture(scope="module")
def zoo(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Any:
    """One for all examples: what was asked for one of them is there for the next."""
    return ModelZoo(
        folder=tmp_path_factory.mktemp("work"),
        vae=Latents(vae=tiny_models.vae, size=16),
        t5=T5(model=tiny_models.t5, max_length=8),
        clip=Clip(model=tiny_models.clip),
        lune=Lune(unet=tiny_models.unet),
        batch_size=4,
    )


@pytest.fixture
def names(zoo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What stands around the examples."""
    monkeypatch.chdir(tmp_path)
    random.seed(0)
    torch.manual_seed(0)
    colours = ["red", "blue", "green", "white"]
    pictures = [Image.new("RGB", (20, 10 + number), colour) for number, colour in enumerate(colours)]
    documented = {name: getattr(tinyflux, name) for name in tinyflux.__all__} | BUILDING
    surroundings = {"torch": torch, "random": random, "zoo": zoo, "images": pictures, "prompts": PROMPTS}
    return {**documented, **surroundings}


def blocks() -> dict[int, str]:
    return {int(number): code for number, _, code in BLOCK.findall(EXAMPLES.read_text())}


def run(number: int, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(blocks()[number], f"example {number}", "exec"), names)
    return names


def test_only_what_the_document_leaves_undefined_is_not_run() -> None:
    assert sorted(blocks()) == list(range(1, 15))
    assert sorted(INVALID) == [4, 7]
    with pytest.raises(SyntaxError):
        compile(blocks()[4], "4", "exec")
    with pytest.raises((NameError, TypeError)):
        exec(blocks()[7], {"Tensor": Tensor})


def test_the_buckets_are_those_of_ours(names: dict[str, Any]) -> None:
    assert run(1, names)["t_buckets"].tolist() == pytest.approx(fb.teachers.BUCKETS)


def test_the_hook_of_the_document_sees_what_lune_listens_to(names: dict[str, Any]) -> None:
    unet, mid_features = tiny_unet(), [None]
    run(2, names | {"unet": unet, "mid_features": mid_features})
    latents, states = torch.randn(2, 4, 8, 8), torch.randn(2, 8, 16)
    with torch.no_grad():
        unet(latents, 420, states)
    heard = plain_lune(unet, latents, 0.42, states)  # which the teacher is held against in test_teachers_models.py
    assert mid_features[0].numpy() == pytest.approx(heard, abs=1e-6)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_cache_is_built_saved_loaded_and_trained_on_as_the_document_says(names: dict[str, Any]) -> None:
    run(12, names)
    low_memory = names["cache"]
    run(11, names)
    high_memory = names["cache"]
    assert high_memory.name == "my_data"
    assert high_memory.cache.root == low_memory.cache.root  # nothing is made twice
    loaded = tinyflux.DatasetCache.load("cache.pt")
    assert Path("cache.pt/cache.json").exists()
    assert fb.verify("cache.pt").sound
    rows = torch.arange(4)
    assert loaded.encodings is not None
    shapes = {"latents": (4, 4, 8, 8), "t5_embeds": (4, 8, 16), "t5_mask": (4, 8), "clip_pooled": (4, 16)}
    for name, shape in shapes.items():
        stored = getattr(loaded.encodings, name)
        assert stored.shape == stored[rows].shape == shape
        assert torch.equal(stored[rows], getattr(low_memory.encodings, name)[rows])
    pooled = loaded.encodings.clip_pooled[rows]
    assert torch.equal(pooled[0], pooled[2])  # equal prompts

    product = fb.open_cache(names["zoo"].root(["a cat"]))
    names |= {"portrait_cache": low_memory, "landscape_cache": loaded, "product_cache": product}
    names |= {
        "local_indices": torch.tensor([0, 3, 0]),
        "dataset_ids": torch.tensor([0, 1, 2]),
        "timesteps": torch.tensor([0.42, 0.05, 0.7]),
    }
    run(8, names)
    assert names["lune_features"].shape == (3, 16)
    assert names["lune_features"].isnan().any(dim=1).tolist() == [False, False, True]

    dropouts = {"lune_dropout": 0.1, "sol_dropout": 0.1}
    names |= {"model": Student(16), "cache": names["multi_cache"], **dropouts}
    run(3, names)
    run(5, names)
    assert names["lune_loss"].item() > 0
    (names["lune_loss"] + names["sol_loss"]).backward()
    assert names["model"].lune_predictor.predict[0].weight.grad.isfinite().all()
    run(10, names | {"lune_dropout": 0.0})

    run(6, names)
    assert names["config"].use_spatial_weighting
    assert spatial_weights(names["sol_spatial"][:2]).shape == (2, 64, 64)


@pytest.mark.slow
def test_the_documents_lookup_runs_on_a_cache_and_agrees(names: dict[str, Any]) -> None:
    run(13, names)
    lune = names["lune"]
    get_features = run(9, names)["get_features"]
    indices, timesteps = torch.arange(4), torch.tensor([0.0, 0.33, 0.42, 1.0])
    theirs = get_features(lune, indices, timesteps)
    ours = lune.get(indices, timesteps)
    assert torch.allclose(theirs, ours, atol=1e-5)


def test_the_alignment_check_of_the_document_passes_on_its_own_file(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    buckets = torch.linspace(0.05, 0.95, 10)
    old = {
        "name": "old",
        "encodings": {
            "latents": torch.randn(3, 16, 64, 64).half(),
            "t5_embeds": torch.randn(3, 128, 768).half(),
            "clip_pooled": torch.randn(3, 768).half(),
        },
        "lune": {"features": torch.randn(3, 10, 1280).half(), "t_buckets": buckets},
        "sol": {"stats": torch.rand(3, 10, 4), "spatial": torch.rand(3, 10, 8, 8), "t_buckets": buckets},
    }
    torch.save(old, "my_cache.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(14, names)
    assert "Cache aligned" in capsys.readouterr().out
