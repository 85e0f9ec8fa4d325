"""Teachers on the command line: building by naming models, going on, estimating, checking alignment."""

import shutil
from pathlib import Path

import pytest
from tests.cli.running import run
from tests.helpers import tiny_pipelines
from tests.helpers.cache_files import chunk_path
from tests.helpers.tiny_models import TinyModels
from tests.helpers.tiny_pipelines import saved
from tests.torch.taught import images_cache

import forebay as fb
from forebay.store import LocalStore

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def prompts(folder: Path) -> Path:
    """A cache of six prompts in a few chunks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text("red cat\nblue dog\nred cat\ntwo dog\na house\nthe hill\n")
    run("build", "raw", folder / "prompts.txt", "--into", folder / "cache", "--chunk-bytes", 60, "--workers", 0)
    return folder / "cache"


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, tiny_models: TinyModels) -> Path:
    root = prompts(tmp_path_factory.mktemp("cli"))
    named = ["--t5", tiny_models.t5, "--clip", tiny_models.clip, "--lune", tiny_models.unet, "--sol", "geometric"]
    grid = ["--bucket", 0.2, "--bucket", 0.8]
    reports = run("build", "teachers", root, *named, *grid, "--max-length", 6, "--batch-size", 2, "--json").json
    assert [report["layer"] for report in reports] == ["t5", "clip", "lune", "sol"]
    assert all(report["built"] == report["chunks"] > 1 for report in reports)
    return root


def test_unfinished_teacher_layers_resume_without_options(taught: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    shutil.copytree(taught, root)
    before = (chunk_path(root, "lune", 1)).read_bytes()
    (chunk_path(root, "lune", 1)).unlink()
    assert f"forebay repair {root}" in run("status", root, code=1).out
    run("repair", root)
    assert (chunk_path(root, "lune", 1)).read_bytes() == before
    assert "layer lune" in run("build", "teachers", root).out
    assert (
        f"resume teacher layers with: forebay build teachers {root}"
        in run("build", root, "--layer", "lune", code=2).err
    )


def test_another_recipe_names_what_differs(taught: Path, tiny_models: TinyModels) -> None:
    told = run("build", "teachers", taught, "--t5", tiny_models.t5, "--max-length", 6, "--batch-size", 3, code=1)
    assert "layer 't5'" in told.err
    assert "batch_size: 2 → 3" in told.err
    assert "resume with its own recipe, replace the layer" in told.err


def test_replace_builds_a_layer_with_other_options(taught: Path, tiny_models: TinyModels, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    shutil.copytree(taught, root)
    pinned = fb.open_cache(root, layers=["lune"])
    lune = ["build", "teachers", root, "--lune", tiny_models.unet, "--bucket", 0.5]
    assert "--replace lune" in run(*lune, code=1).err
    assert "does not build 'sol'" in run(*lune, "--replace", "sol", code=2).err
    report = run(*lune, "--replace", "lune", "--json").json[0]
    assert report["built"] == report["chunks"]
    assert fb.open_cache(root, layers=["lune"]).column("lune").shape == (1, 16)
    assert pinned.read([0], ["lune"])["lune"].shape == (1, 2, 16)
    assert "'clip'" in run("drop", root, "clip", code=1).err


def test_weights_under_another_name_are_the_same_teacher(taught: Path, tiny_models: TinyModels, tmp_path: Path) -> None:
    root, weights = tmp_path / "cache", tmp_path / "fine-tuned.safetensors"
    shutil.copytree(taught, root)
    shutil.copy(Path(tiny_models.unet) / "diffusion_pytorch_model.safetensors", weights)
    lune = ["build", "teachers", root, "--lune", tiny_models.unet, "--json"]
    assert run(*lune, "--lune-weights", weights, "--replace", "lune").json[0]["built"] > 0
    assert run(*lune, "--lune-weights", weights.rename(tmp_path / "renamed.safetensors")).json[0]["built"] == 0
    assert run("build", "teachers", root, "--json", code=1).err  # the recorded place is gone
    (tmp_path / "renamed.safetensors").rename(weights)
    assert run("build", "teachers", root, "--json").json


def test_an_estimate_loads_nothing_and_counts_bytes(
    taught: Path, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["estimate", "teachers", taught, "--lune", tiny_models.unet, "--rows", 10_000]
    found = run(*words, "--json").json
    assert {size["column"]: size["bytes"] for size in found["columns"]} == {
        "lune": 10 * 16 * 2 * 10_000,
        "t_buckets": 80,
    }
    assert found["fits"]
    assert "10, 16 · float16" in run(*words).out
    dry = run("build", "teachers", taught, "--lune", tiny_models.unet, "--dry-run", "--json").json
    assert dry["rows"] == 6
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: 1000)
    assert "not enough disk space" in run(*words, code=1).err


def test_alignment_holds_for_what_was_built(taught: Path) -> None:
    report, found = run("verify", taught, "--align", "--json").json
    assert report["bad"] == []
    layers = {layer["layer"]: layer for layer in found["layers"]}
    assert sorted(layers) == ["clip", "lune", "sol", "t5"]
    assert not any(layer["problems"] for layer in layers.values())
    assert layers["lune"]["buckets"] == [0.2, 0.8]
    assert not layers["lune"]["usual_buckets"]
    assert layers["lune"]["recomputed_rows"] > 0
    assert layers["t5"]["recomputed_rows"] > 0
    assert layers["sol"]["ranges"]["sol_stats"][0] >= 0
    assert "aligned" in run("verify", taught, "--align").out


def test_alignment_tells_a_teacher_that_changed_and_one_that_is_gone(
    taught: Path, tmp_path: Path, tiny_models: TinyModels
) -> None:
    root = prompts(tmp_path)
    shutil.copytree(tiny_models.t5, tmp_path / "t5")
    run("build", "teachers", root, "--t5", tmp_path / "t5", "--max-length", 6)
    config = tmp_path / "t5/config.json"
    config.write_text(config.read_text() + "\n")
    told = run("verify", root, "--align", code=1)
    assert "has changed (differs in: t5/config.json)" in told.out
    shutil.rmtree(tmp_path / "t5")
    told = run("verify", root, "--align")
    assert "no row was recomputed" in told.out
    assert "there is no such folder" in told.out


@pytest.mark.parametrize("storage", ["raw", "jpeg"])
def test_images_bring_their_size_and_captions(tmp_path: Path, tiny_models: TinyModels, storage: str) -> None:
    images = images_cache(tmp_path, storage=storage)
    run("build", "teachers", images, "--vae", tiny_models.vae, "--clip", tiny_models.clip)
    cache = fb.open_cache(images)
    assert cache.recipe("latents").fields["teacher"]["size"] == 16
    read = cache.read(range(5), ["latents", "clip_prompt"])
    assert read["clip.present"].all()
    assert read["latents"].shape == (5, 4, 8, 8)


def test_one_option_names_all_models_of_a_pipeline(tmp_path: Path) -> None:
    model = saved(tmp_path / "flux", tiny_pipelines.flux)
    images = images_cache(tmp_path)
    how = ["--pipeline", model, "--max-length", 6, "--bucket", 0.2, "--bucket", 0.8]
    estimated = run("estimate", "teachers", images, *how, "--json").json
    shapes = {column["column"]: column["shape"] for column in estimated["columns"]}
    assert shapes["latents"] == [4, 8, 8]
    assert shapes["t5_states"] == [6, 48]
    assert shapes["lune"] == [2, 16]
    one = run("build", "teachers", images, *how, "--only", "clip", "--json").json
    assert [report["layer"] for report in one] == ["clip"]
    reports = run("build", "teachers", images, *how, "--noise", "noised", "--json").json
    assert [report["layer"] for report in reports] == ["latents", "clip", "t5", "lune"]
    assert fb.open_cache(images, layers=["latents", "lune"]).read([0], ["lune.present"])["lune.present"].all()
    _, aligned = run("verify", images, "--align", "--json").json
    assert {layer["layer"]: layer["recomputed_rows"] > 0 for layer in aligned["layers"]} == dict.fromkeys(
        ("latents", "clip", "t5", "lune"), True
    )
    assert not any(layer["problems"] for layer in aligned["layers"])
    assert "use two commands" in run("build", "teachers", images, *how, "--vae", "x", code=2).err
    assert (
        "pass --only with one of: latents, clip, t5, lune"
        in run("build", "teachers", images, *how, "--only", "sol", code=2).err
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "t5"], "--only needs --pipeline"),
        (["--vae", "x"], "--vae needs images, but"),
        (["--seed", "3"], "missing a teacher (--vae, --t5, --clip, --lune, --sol)"),
        ([], "has no teacher layer"),
        (["--bucket", "x"], "'x' is not valid\nhint: it must be a number"),
        (["--sol", "geometric", "--start-chunk", "9"], "--start-chunk 9 is beyond the plan"),
        (["--sol", "geometric", "--start-chunk", "2", "--end-chunk", "1"], "--start-chunk 2 comes after --end-chunk 1"),
    ],
)
def test_wrong_usage_says_what_to_do(tmp_path: Path, words: list[str], said: str) -> None:
    assert said in run("build", "teachers", prompts(tmp_path), *words, code=2).err
