"""Losses, positions, validation and limited epochs in transformers and Lightning; `test_resume_table.py` has the rest.

They are imported by the tests that need them, so that collecting costs nothing. Warnings that are ignored here are of
these libraries about each other; each is named by its text.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.token_caches import token_cache
from torch.optim.lr_scheduler import LambdaLR

import forebay as fb
from forebay.torch import CacheDataset, Loader, Schedule, Split, TokenBatch, document_leaks

ROWS, BATCH, STEPS, STOP = 64, 4, 14, 6
VOCABULARY = 65_536
TRAINING = Split("train", fraction=0.7)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(token_cache(tmp_path_factory.mktemp("tokens"), ROWS))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Losses are compared bit by bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Embedded(torch.nn.Module):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens).square().mean()


def rows_of(batch: dict[str, torch.Tensor]) -> list[int]:
    """A row of numbered tokens begins with its number."""
    return batch["tokens"][:, 0].tolist()


class TestTransformers:
    """`transformers.Trainer` on a tiny GPT-2 with random weights."""

    def run(self, folder: Path, cache: fb.Cache, stop: int | None = None) -> tuple[dict[int, tuple], list, Any]:
        """(loss, rate) by step, the rows of the batches, the model; from the checkpoint of a folder if it has one."""
        transformers = import_module("transformers")
        seen: list[list[int]] = []

        def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            seen.append([int(row["input_ids"][0]) for row in rows])
            return transformers.default_data_collator(rows)

        class Stop(transformers.TrainerCallback):
            def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
                control.should_training_stop |= state.global_step == stop

        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=1, n_head=2, loss_type="ForCausalLM"
        )
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        names = {"input_ids": "tokens", "labels": "labels", "position_ids": "positions"}
        dataset = CacheDataset(cache, selection=TRAINING, names=names, collate=TokenBatch(cache, labels="unshifted"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = Schedule(len(dataset), epochs=2, effective_batch=BATCH, warmup_share=0.2)
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            logging_steps=1,
            save_steps=STOP,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            log_level="error",
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=dataset,
            data_collator=collate,
            optimizers=(optimizer, LambdaLR(optimizer, schedule)),
            callbacks=[Stop()],
        )
        checkpoint = folder / f"checkpoint-{STOP}"
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint.exists() else None)
        history = {entry["step"]: (entry["loss"], entry["learning_rate"]) for entry in trainer.state.log_history[:-1]}
        return history, seen, trainer.model

    @pytest.mark.slow
    def test_stopped_and_resumed_it_trains_as_if_it_had_not_been(self, tmp_path: Path, cache: fb.Cache) -> None:
        whole, rows, model = self.run(tmp_path / "whole", cache)
        assert len(whole) == STEPS
        assert whole[STEPS][0] < whole[1][0]
        stopped, _, _ = self.run(tmp_path / "stopped", cache, stop=STOP)
        assert list(stopped) == list(range(1, STOP + 1))
        resumed, rows_again, model_again = self.run(tmp_path / "stopped", cache)
        assert resumed == whole
        assert rows_again[-2:] == rows[-2:]
        assert 0 < len({row for batch in rows for row in batch}) < ROWS, "only the training side"
        weights = zip(model.parameters(), model_again.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in weights)

    @pytest.mark.slow
    def test_positions_keep_the_documents_of_a_row_apart(self, tmp_path: Path, cache: fb.Cache) -> None:
        model = self.run(tmp_path, cache, stop=1)[2].eval()
        batch = next(iter(Loader(cache, global_batch_size=6, shuffle=None)))

        def logits(tokens: torch.Tensor) -> torch.Tensor:
            return model(input_ids=tokens, position_ids=batch["positions"]).logits

        assert not document_leaks(logits, batch["tokens"], batch["seq_lens"])


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
class TestLightning:
    """`lightning.Trainer`, which keeps the state of a loader that has one."""

    def epochs(self, folder: Path, train: Loader, held_out: Loader, **options: Any) -> tuple[list, list]:
        """The rows of every batch that an epoch trained on, and of every batch that it was validated on."""
        lightning = import_module("lightning")

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = Embedded()
                self.trained: dict[int, list] = {}
                self.validated: dict[int, list] = {}

            def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
                self.trained.setdefault(self.current_epoch, []).append(rows_of(batch))
                return self.model(batch["tokens"])

            def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
                if not self.trainer.sanity_checking:
                    self.validated.setdefault(self.current_epoch, []).append(rows_of(batch))

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        trainer = lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **options,
        )
        module = Module()
        trainer.fit(module, train, held_out)
        return list(module.trained.values()), list(module.validated.values())

    def test_every_epoch_has_all_batches_and_validates_on_all_rows(self, tmp_path: Path, cache: fb.Cache) -> None:
        def loaders() -> tuple[Loader, Loader]:
            rest = Split("validation", fraction=0.7)
            return (
                Loader(cache, global_batch_size=BATCH, selection=TRAINING, seed=5),
                Loader(cache, global_batch_size=BATCH, selection=rest, shuffle=None, drop_last=False, restart=True),
            )

        trained, validated = self.epochs(tmp_path, *loaders(), max_epochs=4)
        plain, held_out = loaders()
        assert trained == [[rows_of(batch) for batch in plain] for _ in range(4)]
        assert validated == [[rows_of(batch) for batch in held_out]] * 4
        assert sum(len(rows) for rows in validated[0]) == held_out.stream.size(0)

    def test_limited_epochs_go_through_the_rows_one_after_the_other(self, tmp_path: Path, cache: fb.Cache) -> None:
        train = Loader(cache, global_batch_size=BATCH, seed=5)
        held_out = Loader(cache, global_batch_size=BATCH, shuffle=None, restart=True)
        options = {"max_epochs": 3, "limit_train_batches": 5, "limit_val_batches": 1}
        trained, _ = self.epochs(tmp_path, train, held_out, **options)
        whole = [rows_of(batch) for batch in Loader(cache, global_batch_size=BATCH, seed=5)]
        assert trained == [whole[0:5], whole[5:10], whole[10:15]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated, please do not call:UserWarning")
class TestTorchdata:
    """torchdata's protocol for objects with a state."""

    def test_a_loader_is_stateful(self, cache: fb.Cache) -> None:
        stateful = import_module("torchdata.stateful_dataloader.stateful")
        assert isinstance(Loader(cache, global_batch_size=BATCH), stateful.Stateful)
