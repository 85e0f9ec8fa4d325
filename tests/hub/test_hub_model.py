"""A model on the hub as a folder: checked files under their names, there without the network once it was seen."""

import hashlib
from functools import partial
from pathlib import Path

import pytest
from tests.hub.server import Drop, HubServer, Status

from forebay.errors import ModelUnusable, SourceNotFound
from forebay.hub import RetryPolicy, model_files
from forebay.teachers import pipeline
from forebay.teachers.protocol import hashes, tokenizer_of

QUICK = RetryPolicy(retries=2, timeout=5, first_wait=0.01)
WANTED = (".safetensors", "config.json")
FILES = {
    "unet/config.json": b'{"sample_size": 8}',
    "unet/diffusion_pytorch_model.safetensors": b"weights" * 500,
    "unet/diffusion_pytorch_model.bin": b"a pickle",
    "unet/deeper/config.json": b"{}",
    "vae/config.json": b"{}",
    "tuned.safetensors": b"tuned" * 300,
    "text_encoder_2/config.json": b"{}",
    "text_encoder_2/model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}',
    "text_encoder_2/model-1.safetensors": b"a shard",
    "tokenizer_2/tokenizer.json": b"{}",
}


def ask(hub: HubServer, folder: Path, path: str) -> Path:
    return Path(model_files("org/sd", path, WANTED, folder=str(folder), endpoint=hub.address, patience=QUICK))


def test_a_folder_has_what_is_wanted_of_it_under_its_names(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/sd", FILES, "models")
    hub.spoil("diffusion_pytorch_model.safetensors", Drop(after=100), Status(503))
    folder = ask(hub, tmp_path, "unet")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert (folder / "diffusion_pytorch_model.safetensors").read_bytes() == b"weights" * 500
    asked = len(hub.asked("diffusion_pytorch_model.safetensors"))
    assert ask(hub, tmp_path, "unet") == folder
    assert len(hub.asked("diffusion_pytorch_model.safetensors")) == asked
    digest = hashlib.sha256(b"weights" * 500).hexdigest()
    assert hashes("unet", str(folder))["unet/diffusion_pytorch_model.safetensors"] == digest


def test_a_single_file_is_its_path_and_a_folder_of_none_is_told(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/sd", FILES, "models")
    assert ask(hub, tmp_path, "tuned.safetensors").read_bytes() == b"tuned" * 300
    with pytest.raises(SourceNotFound, match=r"'text_encoder' of the model 'org/sd'.*no such file"):
        ask(hub, tmp_path, "text_encoder")


def test_without_the_hub_what_was_seen_last_is_used(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/sd", FILES, "models")
    folder = ask(hub, tmp_path, "unet")
    hub.spoil("org/sd", *[Status(503)] * 20)
    assert ask(hub, tmp_path, "unet") == folder


def test_shards_and_the_tokenizer_of_a_pipeline_are_brought_too(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/sd", FILES, "models")
    monkeypatch.setattr("forebay.hub.model_files", partial(model_files, endpoint=hub.address, patience=QUICK))
    named = "org/sd/text_encoder_2"
    tokenizer = tokenizer_of(named, None)
    assert tokenizer == "org/sd/tokenizer_2"
    assert set(hashes("t5", named, tokenizer=tokenizer)) == {
        "t5/config.json", "t5/model.safetensors.index.json", "t5/model-1.safetensors", "t5/tokenizer/tokenizer.json",
    }  # fmt: skip
    with pytest.raises(ModelUnusable, match=r"nothing of that name is on this disk, and cannot get .* from the hub"):
        hashes("t5", "org/sd/text_encoder_7")


def test_of_a_pipeline_only_its_index_is_fetched_before_its_parts_are_needed(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = b'{"_class_name": "FluxPipeline"}'
    hub.add("org/flux", {"model_index.json": index, "flux.safetensors": b"all in one file"}, "models")
    monkeypatch.setattr("forebay.hub.model_files", partial(model_files, endpoint=hub.address, patience=QUICK))
    recipes = pipeline("org/flux", size=16)
    assert recipes["latents"].model.vae == "org/flux/vae"
    assert recipes["t5"].model.model == "org/flux/text_encoder_2"
    assert len(hub.asked("model_index.json")) == 1
    assert not hub.asked("flux.safetensors")
