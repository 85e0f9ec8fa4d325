"""A model on the hub as a folder, or its tokenizer: checked files, available offline after the first download."""

import hashlib
import re
from functools import partial
from pathlib import Path

import pytest
from tests.hub.server import Drop, Flip, HubServer, Status

from forebay.errors import ModelUnusable, SourceNotFound, SourceUnreadable, StoreUnavailable
from forebay.hub import RetryPolicy, model_files, tokenizer_json
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


TOKENIZER = b'{"version": "1.0", "model": {"type": "BPE"}}' * 100


def tokenizer(address: str, folder: Path, name: str = "org/model") -> bytes:
    return tokenizer_json(name, folder=str(folder), endpoint=address, patience=QUICK)


def test_tokenizer_is_downloaded_once_per_commit_and_checked_at_each_use(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/model", {"tokenizer.json": TOKENIZER, "config.json": b"{}"}, "models")
    hub.spoil("tokenizer.json", Drop(after=100), Status(429, {"Retry-After": "0"}))
    for _ in range(2):
        assert tokenizer(hub.address, tmp_path) == TOKENIZER
        assert len(hub.asked("tokenizer.json")) == 3
    (stored,) = tmp_path.rglob("tokenizer.json")
    stored.write_bytes(b"damaged")
    assert tokenizer(hub.address, tmp_path) == TOKENIZER
    hub.add("org/model", {"tokenizer.json": TOKENIZER + b" "}, "models")
    assert tokenizer(hub.address, tmp_path) == TOKENIZER + b" "


@pytest.mark.parametrize("damage", [b"", b'"size":-1', b'"path":"../x"', b'"identity":"../x"'])
def test_damaged_listing_of_a_model_is_requested_again(hub: HubServer, tmp_path: Path, damage: bytes) -> None:
    hub.add("org/model", {"tokenizer.json": TOKENIZER}, "models")
    assert tokenizer(hub.address, tmp_path) == TOKENIZER
    (stored,) = tmp_path.glob("models/*.json")
    field = damage.partition(b":")[0]
    content = re.sub(field + rb":[^,}]*", damage, stored.read_bytes()[32:]) if damage else b"{}"
    stored.write_bytes(hashlib.sha256(content).digest() + content)
    assert tokenizer(hub.address, tmp_path) == TOKENIZER
    assert len(hub.asked("/tree/")) == 2
    stored.write_bytes(stored.read_bytes()[:-1] + b"]")  # its digest is wrong
    assert tokenizer(hub.address, tmp_path) == TOKENIZER
    assert len(hub.asked("/tree/")) == 3


@pytest.mark.parametrize("is_offline", [False, True], ids=["hub down", "offline mode"])
def test_newest_known_model_is_used_without_the_hub(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    hub.add("org/model", {"tokenizer.json": TOKENIZER}, "models")
    tokenizer(hub.address, tmp_path)
    asked = len(hub.requests)
    if is_offline:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(StoreUnavailable, match=r"(?s)'org/other'.*offline mode.*local files"):
            tokenizer(hub.address, tmp_path, "org/other")
    hub.spoil("org/model", *[Status(503)] * 20)
    assert tokenizer(hub.address, tmp_path) == TOKENIZER
    assert len(hub.requests) == asked + (not is_offline)


def test_unusable_models_are_errors_with_a_way_out(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"(?s)the model 'org/model'.*3 attempts.*HF_ENDPOINT.*local files"):
        tokenizer("http://127.0.0.1:9", tmp_path)
    hub.add("org/model", {"config.json": b"{}"}, "models")
    with pytest.raises(SourceNotFound, match=r"'tokenizer\.json' of the model .*no such file(?s:.*)pass its path"):
        tokenizer(hub.address, tmp_path)
    with pytest.raises(SourceNotFound, match=r"(?s)'org/none'.*check the name"):
        tokenizer(hub.address, tmp_path, "org/none")
    hub.add("org/model", {"tokenizer.json": TOKENIZER}, "models")
    hub.spoil("tokenizer.json", *[Flip(at=3)] * 3)
    with pytest.raises(SourceUnreadable, match=r"'tokenizer\.json' of the model 'org/model'"):
        tokenizer(hub.address, tmp_path)


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
