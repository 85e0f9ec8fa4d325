"""TRL's trainers, fed from caches, have the loss of our own batches on the same rows."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.chat.preference_caches import chat_cache, chatml, llama, preference_cache, write_lines

import forebay as fb
from forebay.chat import prepared, trainers, write_dpo, write_sft
from forebay.teachers import LogProbs, TeacherRecipe
from forebay.torch import Loader, PreferenceBatch, TokenBatch

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
BETA = 0.1
ROWS = 8


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return chat_cache(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    root = tmp_path_factory.mktemp("preferences")
    cache = preference_cache(root, ROWS)
    llama(1).save_pretrained(root / "reference")
    teacher = LogProbs(model=str(root / "reference"), over="preferences")
    fb.build_layers(cache.root, {"ref": TeacherRecipe(teacher=teacher)})
    return fb.open_cache(cache.root)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = chatml(tmp_path_factory.mktemp("processor"))
    end = "<|im_end|>"
    return transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", eos_token=end, pad_token=end)


def settings(folder: Path, rows: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "run"), "per_device_train_batch_size": rows, "max_steps": 1, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "gradient_checkpointing": False,
        "disable_tqdm": True, "learning_rate": 0.0, "max_length": None, "dataloader_pin_memory": False, "seed": 0,
    }  # fmt: skip


def first_loss(trainer: Any) -> float:
    trainer.train()
    return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


def loss_of(model: Any, batch: dict[str, torch.Tensor], rows: int) -> float:
    """The mean over the labels of some rows, each document run by itself."""
    total, count = 0.0, 0
    for row in range(rows):
        start = 0
        lengths = batch["seq_lens"][row]
        for length in lengths[lengths > 0].tolist():
            tokens, labels = (batch[name][row, start : start + length] for name in ("tokens", "labels"))
            with torch.no_grad():
                logits = model(input_ids=tokens[None]).logits[0].double()
            total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
            count += int((labels >= 0).sum())
            start += length
    return total / count


def our_batch(cache: fb.Cache, **arguments: Any) -> dict[str, torch.Tensor]:
    collate = TokenBatch(cache, **arguments)
    return next(iter(Loader(cache, global_batch_size=len(cache), shuffle=None, threads=0, collate=collate)))


@pytest.mark.parametrize("train_on", [None, ("response",)])
def test_documents_have_the_labels_of_the_loader(chat: fb.Cache, tmp_path: Path, train_on: Any) -> None:
    count = write_sft(chat, tmp_path / "sft.parquet", train_on=train_on)
    written = datasets.Dataset.from_parquet(str(tmp_path / "sft.parquet"), cache_dir=str(tmp_path / "hf"))
    batch = our_batch(chat, labels="unshifted", train_on=train_on)
    wanted = []
    for tokens, labels, lengths in zip(batch["tokens"], batch["labels"], batch["seq_lens"], strict=True):
        edges = [0, *lengths[lengths > 0].cumsum(0).tolist()]
        wanted += [(tokens[a:b].tolist(), labels[a:b].tolist()) for a, b in pairwise(edges)]
    assert count == len(written) == len(wanted) == 30
    for row, (tokens, labels) in zip(written, wanted, strict=True):
        assert row["input_ids"] == tokens
        assert row["labels"] == labels
        assert row["attention_mask"] == [1] * len(tokens)
        assert row["completion_mask"] == [int(label >= 0) for label in labels]


def test_axolotl_and_llama_factory_get_the_columns_and_the_folder_that_they_read(
    chat: fb.Cache, tmp_path: Path
) -> None:
    """Exactly three columns for the one, a folder of `save_to_disk` for the other."""
    wanted = ["input_ids", "attention_mask", "labels"]
    write_sft(chat, tmp_path / "sft.arrow", columns=wanted)
    data = datasets.Dataset.from_file(str(tmp_path / "sft.arrow"))
    assert data.column_names == wanted
    data.save_to_disk(tmp_path / "tokenized")
    assert datasets.load_from_disk(tmp_path / "tokenized")["labels"][0] == data["labels"][0]
    for columns in ([], ["seq_lengths"]):
        with pytest.raises(ValueError, match="columns must name some of input_ids, attention_mask, labels, compl"):
            write_sft(chat, tmp_path / "a", columns=columns)


@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_of_the_sft_trainer_is_that_of_the_loader(
    chat: fb.Cache, tmp_path: Path, processor: Any, packed: bool
) -> None:
    write_sft(chat, tmp_path / "sft.arrow", packed=packed)
    data = datasets.Dataset.from_file(str(tmp_path / "sft.arrow"))
    batch = our_batch(chat)
    rows = 3 if packed else int((batch["seq_lens"][:3] > 0).sum())  # as documents, those of three packed rows
    assert int((batch["seq_lens"][:3] > 0).sum()) > 3
    arguments = trl.SFTConfig(
        **settings(tmp_path, rows), padding_free=packed, dataset_kwargs={"skip_prepare_dataset": True}
    )
    model = llama()
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=data.select(range(rows)), processing_class=processor)
    assert first_loss(trainer) == pytest.approx(loss_of(model.eval(), batch, 3), abs=1e-6)


def test_the_loss_of_the_dpo_trainer_is_that_of_preference_batches(
    preferences: fb.Cache, tmp_path: Path, processor: Any
) -> None:
    """With log-probs of the reference model from the layer: TRL loads no reference model."""
    assert write_dpo(preferences, tmp_path / "dpo.arrow", reference="ref_logps") == ROWS
    data = datasets.Dataset.from_file(str(tmp_path / "dpo.arrow"))
    arguments = trl.DPOConfig(**settings(tmp_path, ROWS), beta=BETA, precompute_ref_log_probs=True)
    model = llama(2)
    trainer = prepared(trl.DPOTrainer)(model, args=arguments, train_dataset=data, processing_class=processor)
    assert trainer.ref_model is None
    found = first_loss(trainer)
    pairs = PreferenceBatch(preferences, log_probs=["ref_logps"])
    batch = next(iter(Loader(preferences, global_batch_size=len(preferences), shuffle=None, collate=pairs)))
    trained = batch["labels"] >= 0
    mask = torch.arange(batch["tokens"].shape[1]) < batch["seq_lens"]
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["tokens"], attention_mask=mask.long()).logits.float()
    own = logits.log_softmax(-1).gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    ratios = torch.where(trained, own - batch["ref_logps"], 0.0).sum(1)
    wanted = -torch.nn.functional.logsigmoid(BETA * (ratios[:ROWS] - ratios[ROWS:])).mean()
    assert found == pytest.approx(float(wanted), abs=1e-6)
    assert abs(found - math.log(2)) > 1e-4, "the reference is the model itself"


def test_the_reference_that_trl_computes_is_the_layer(preferences: fb.Cache, tmp_path: Path, processor: Any) -> None:
    write_dpo(preferences, tmp_path / "dpo.arrow", reference="ref_logps")
    data = datasets.Dataset.from_file(str(tmp_path / "dpo.arrow"))
    stored = data.remove_columns(["ref_chosen_logps", "ref_rejected_logps"])
    trainer = prepared(trl.DPOTrainer)(
        llama(2), ref_model=llama(1), args=trl.DPOConfig(**settings(tmp_path, ROWS), precompute_ref_log_probs=True),
        train_dataset=stored, processing_class=processor,
    )  # fmt: skip
    for name in ("ref_chosen_logps", "ref_rejected_logps"):
        np.testing.assert_allclose(trainer.train_dataset[name], data[name], rtol=1e-5)


def test_an_unknown_treatment_of_untrained_rows_is_an_error(preferences: fb.Cache, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"untrained must be 'error' or 'drop' \(got 'dorp'\); did you mean 'drop'"):
        write_dpo(preferences, tmp_path / "dpo.arrow", untrained="dorp")  # type: ignore[arg-type]


def test_rows_that_trl_would_train_wrongly_are_refused(tmp_path: Path) -> None:
    """A tool's result within a candidate is not the model's, and TRL has no mask for it."""
    longer = [
        {"role": "assistant", "content": "one"}, {"role": "user", "content": "two"},
        {"role": "assistant", "content": "three"},
    ]  # fmt: skip
    records: list[dict[str, Any]] = [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}, {"prompt": "Hi", "chosen": longer, "rejected": "No"}
    ]  # fmt: skip
    source = write_lines(tmp_path / "pairs.jsonl", records)
    recipe = fb.PreferenceRecipe(tokenizer=chatml(tmp_path / "model"), sequence_length=64)
    fb.build(tmp_path / "cache", fb.sources.lines(source), recipe, workers=0)
    cache = fb.open_cache(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"row 1 of .* TRL would train on them; pass untrained='drop'"):
        write_dpo(cache, tmp_path / "dpo.arrow")
    assert list(tmp_path.glob("dpo*")) == []
    assert write_dpo(cache, tmp_path / "dpo.arrow", untrained="drop") == 1


def test_what_trainers_have_no_column_for_is_refused(chat: fb.Cache, preferences: fb.Cache, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weights other than 0 and 1"):
        write_sft(chat, tmp_path / "a", train_on={"response": 1.0, "stop": 0.5})
    with pytest.raises(ValueError, match="is a cache of chat; write_dpo reads caches of preferences"):
        write_dpo(chat, tmp_path / "a")
    with pytest.raises(ValueError, match="is a cache of preferences; write_sft reads token and chat caches"):
        write_sft(preferences, tmp_path / "a.arrow")
    with pytest.raises(ValueError, match=r"path must end with \.arrow or \.parquet \(got '.*a\.csv'\)"):
        write_sft(chat, tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_cache_is_reported_although_an_earlier_file_was_left_unfinished(tmp_path: Path) -> None:
    (tmp_path / "x.arrow.unfinished").touch()
    with pytest.raises(ValueError, match="damaged"):
        trainers._write(tmp_path / "x.arrow", _damaged())
    with pytest.raises(ValueError, match="damaged"):
        trainers._write(tmp_path / "y.arrow", _damaged({"a": np.arange(3)}))
    assert not list(tmp_path.glob("y.*"))


def _damaged(*chunks: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from chunks
    raise ValueError("damaged")
