"""What the models' libraries would let pass: code beside a model, devices that are not there, other canvases."""

import json
import shutil
from pathlib import Path

import pytest
from tests.helpers.tiny_models import TinyModels
from tests.torch.taught import images_cache, prompts_cache, recipe

import forebay as fb
from forebay.errors import ModelUnusable
from forebay.teachers import T5, Clip, Hook, Latents, Lune

pytestmark = pytest.mark.usefixtures("one_thread")

CODE = "from pathlib import Path\nPath({path!r}).touch()\nclass Own: pass\n"


@pytest.fixture
def with_code(tmp_path: Path, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that brings code of its own, on a terminal where everything is answered with yes."""
    shutil.copytree(tiny_models.t5, tmp_path / "model")
    (tmp_path / "model/own.py").write_text(CODE.format(path=str(tmp_path / "ran")))
    for name, mapped in {
        "config.json": {"AutoModel": "own.Own", "AutoConfig": "own.Own"},
        "tokenizer_config.json": {"AutoTokenizer": ["own.Own", None]},
    }.items():
        kept = json.loads((tmp_path / "model" / name).read_text())
        kept |= {"auto_map": mapped, "model_type": "own", "tokenizer_class": "Own"}
        (tmp_path / "model" / name).write_text(json.dumps(kept))
    monkeypatch.setattr("builtins.input", lambda *asked: "y")
    return tmp_path / "model"


@pytest.mark.parametrize("weights", [None, "model.safetensors"])
def test_code_beside_a_model_is_never_run(with_code: Path, weights: str | None) -> None:
    model = {"model": str(with_code), "weights": str(with_code / weights) if weights else None}
    hook = Hook(**model, architecture="AutoModel", submodule="encoder", shape=(16,), arguments={})
    with pytest.raises(ModelUnusable, match="custom code"):
        hook.load("cpu", "float32")
    assert not (with_code.parent / "ran").exists()


def test_code_beside_a_tokenizer_is_never_run(with_code: Path, tiny_models: TinyModels) -> None:
    with pytest.raises(ModelUnusable, match="its tokenizer cannot be loaded"):
        T5(model=tiny_models.t5, tokenizer=str(with_code)).load("cpu", "float32")
    assert not (with_code.parent / "ran").exists()


def test_latents_of_another_canvas_are_refused(tmp_path: Path, tiny_models: TinyModels) -> None:
    """The content would lie in a corner, and nobody would see it."""
    with pytest.raises(
        ModelUnusable, match=r"the box of image '0.png', \[0, 0, 16, 16\], is not that of a canvas of 32"
    ):
        fb.build(images_cache(tmp_path), None, recipe(Latents(vae=tiny_models.vae, size=32)))


def test_pooled_states_are_rejected_where_a_model_reads_one_state_per_token(
    tmp_path: Path, tiny_models: TinyModels
) -> None:
    root = prompts_cache(tmp_path)
    fb.build(root, None, recipe(Clip(model=tiny_models.clip)))
    with pytest.raises(ModelUnusable, match=r"'clip_pooled' holds those of real tokens only"):
        fb.build(root, None, recipe(Lune(unet=tiny_models.unet, text="clip_pooled")))
