"""The table of the training guide that says which loaders and trainers resume exactly: each line is a test.

A run has three epochs, each with every row once; it is stopped in the second and resumed from its trainer's checkpoint.
A line says `exact` where the rows, or the random choices of a transform, are those of the uninterrupted run.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.resume_table import (
    BATCH,
    EPOCH,
    ROWS,
    STEPS,
    STOP,
    Run,
    Step,
    Train,
    line,
    loader_steps,
    new_dataset,
    new_loader,
    step_of,
    table_lines,
    world_size,
)
from tests.helpers.token_caches import token_cache
from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader

import forebay as fb
from forebay.torch import CacheDataset, Loader, TokenBatch

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated, please do not call:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(token_cache(tmp_path_factory.mktemp("tokens"), ROWS))


@line
def test_loader_alone(cache: fb.Cache, tmp_path: Path) -> Run:
    stopped, resumed = new_loader(cache), new_loader(cache)
    first = [step_of(batch) for batch in stopped.forever(STOP)]
    resumed.load_state_dict(stopped.state_dict())
    rest = [step_of(batch) for batch in resumed.forever(STEPS - STOP)]
    return loader_steps(cache), first, rest


def lightning_run(data: Any, folder: Path, steps: int, resume: Path | None = None) -> list[Step]:
    lightning = import_module("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.seen = torch.nn.Parameter(torch.ones(())), []

        def on_train_epoch_start(self) -> None:
            if isinstance(data, DataLoader):
                data.dataset.set_epoch(self.current_epoch)

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            self.seen.append(step_of(batch))
            return self.weight * batch["coin"].sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", devices=world_size(), default_root_dir=folder,
        strategy="ddp" if distributed.is_initialized() else "auto",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module.seen


def lightning_twice(data: Callable[[], Any], folder: Path) -> Run:
    whole = lightning_run(data(), folder, STEPS)
    return whole, lightning_run(data(), folder, STOP), lightning_run(data(), folder, STEPS, folder / "last.ckpt")


def lightning_rows(cache: fb.Cache) -> Any:
    class Rows(import_module("lightning").LightningDataModule):
        def train_dataloader(self) -> Loader:
            return new_loader(cache)

    return Rows()


@line
def test_lightning_with_a_loader(cache: fb.Cache, tmp_path: Path) -> Run:
    return lightning_twice(lambda: lightning_rows(cache), tmp_path)


@line
def test_lightning_with_a_dataloader(cache: fb.Cache, tmp_path: Path) -> Run:
    return lightning_twice(lambda: DataLoader(new_dataset(cache), batch_size=BATCH), tmp_path)


def train_accelerate(cache: fb.Cache, folder: Path, first: int, last: int) -> list[Step]:
    accelerator, loader = import_module("accelerate").Accelerator(cpu=True), new_loader(cache)
    accelerator.register_for_checkpointing(loader)
    if first:
        accelerator.load_state(str(folder / f"step-{first}"))
    seen = [step_of(batch) for batch in loader.forever(last - first)]
    accelerator.save_state(str(folder / f"step-{last}"))
    return seen


def train_accelerate_dataset(cache: fb.Cache, folder: Path, first: int, last: int) -> list[Step]:
    accelerate = import_module("accelerate")
    accelerate.utils.set_seed(3)
    seedable = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=seedable)
    loader = accelerator.prepare(DataLoader(new_dataset(cache), batch_size=BATCH // world_size(), shuffle=True))
    seen: list[Step] = []
    for epoch in range(first // EPOCH, -(-last // EPOCH)):
        skipped = accelerate.skip_first_batches(loader, first % EPOCH if epoch == first // EPOCH else 0)
        skipped.set_epoch(epoch)
        seen += map(step_of, islice(skipped, last - first - len(seen)))
    return seen


def run_of(train: Train, cache: fb.Cache, folder: Path) -> Run:
    return train(cache, folder, 0, STEPS), train(cache, folder, 0, STOP), train(cache, folder, STOP, STEPS)


@line
def test_accelerate_with_a_loader(cache: fb.Cache, tmp_path: Path) -> Run:
    return run_of(train_accelerate, cache, tmp_path)


@line
def test_accelerate_skips_batches(cache: fb.Cache, tmp_path: Path) -> Run:
    return run_of(train_accelerate_dataset, cache, tmp_path)


class BaseDataLoader(Stateful, ABC):
    """As torchtitan declares it: an iterable with a state, which its checkpoints save beside the model's."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]: ...


class TitanLoader(BaseDataLoader):
    """Yields what torchtitan trains on: inputs by name, and labels."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for batch in self.loader.forever():
            yield {"input": batch["tokens"], "positions": batch["positions"], "coin": batch["coin"]}, batch["labels"]

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


@line
def test_torchtitan_interface(cache: fb.Cache, tmp_path: Path) -> Run:
    def run(loader: TitanLoader, steps: int) -> list[Step]:
        return [step_of(inputs, "input") for inputs, _ in islice(loader, steps)]

    stopped, resumed = TitanLoader(new_loader(cache)), TitanLoader(new_loader(cache))
    first = run(stopped, STOP)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        dcp.save({"dataloader": stopped}, checkpoint_id=tmp_path / "titan")
        dcp.load({"dataloader": resumed}, checkpoint_id=tmp_path / "titan")
        rest = run(resumed, STEPS - STOP)
    finally:
        distributed.destroy_process_group()
    return run(TitanLoader(new_loader(cache)), STEPS), first, rest


def stateful_twice(cache: fb.Cache, workers: int = 0) -> Run:
    stateful = import_module("torchdata.stateful_dataloader")

    def new() -> Any:
        torch.manual_seed(0)
        return stateful.StatefulDataLoader(new_dataset(cache), batch_size=BATCH, shuffle=True, num_workers=workers)

    def run(loader: Any, steps: int, start: int = 0) -> list[Step]:
        seen: list[Step] = []
        for epoch in range(start // EPOCH, -(-(start + steps) // EPOCH)):
            loader.dataset.set_epoch(epoch)
            seen += map(step_of, islice(loader, steps - len(seen)))
        return seen

    stopped, resumed = new(), new()
    first = run(stopped, STOP)
    resumed.load_state_dict(stopped.state_dict())
    return run(new(), STEPS), first, run(resumed, STEPS - STOP, start=STOP)


@line
def test_stateful_dataloader(cache: fb.Cache, tmp_path: Path) -> Run:
    return stateful_twice(cache)


@line
def test_stateful_dataloader_with_workers(cache: fb.Cache, tmp_path: Path) -> Run:
    return stateful_twice(cache, workers=2)


class Recorder(torch.nn.Module):
    """A model of one number that keeps what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.ones(())), []

    def forward(self, input_ids: Tensor, coin: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.seen.append(step_of({"tokens": input_ids, "coin": coin}))
        return {"loss": self.weight * coin.sum()}


def trainer_settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": BATCH, "save_steps": STOP,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "log_level": "error", "seed": 4,
    }  # fmt: skip


def set_epoch(dataset: CacheDataset) -> Any:
    """The callback of the guide."""

    class SetEpoch(import_module("transformers").TrainerCallback):
        def on_epoch_begin(self, args: object, state: Any, control: object, **_: object) -> None:
            dataset.set_epoch(int(state.epoch))

    return SetEpoch()


def trainer_twice(folder: Path, new: Callable[[dict[str, Any]], tuple[Any, list[Step]]]) -> Run:
    """A run of all steps, whose checkpoint after `STOP` of them another one resumes from."""
    trainer, whole = new(trainer_settings(folder))
    trainer.train()
    again, rest = new(trainer_settings(folder))
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{STOP}"))
    return whole, whole[:STOP], rest


NAMES = {"input_ids": "tokens", "labels": "labels", "coin": "coin"}


def new_trainer(cache: fb.Cache, settings: dict[str, Any], callback: bool = True) -> tuple[Any, list[Step]]:
    transformers = import_module("transformers")
    dataset, model = new_dataset(cache, collate=TokenBatch(cache, labels="unshifted"), names=NAMES), Recorder()
    arguments = transformers.TrainingArguments(**settings)
    callbacks = [set_epoch(dataset)] if callback else []
    return transformers.Trainer(model, arguments, train_dataset=dataset, callbacks=callbacks), model.seen


def train_transformers(cache: fb.Cache, folder: Path, first: int, last: int) -> list[Step]:
    changed = {"max_steps": last, "save_steps": last, "per_device_train_batch_size": BATCH // world_size()}
    trainer, seen = new_trainer(cache, trainer_settings(folder) | changed)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{first}") if first else None)
    return seen


@line
def test_transformers_trainer(cache: fb.Cache, tmp_path: Path) -> Run:
    return trainer_twice(tmp_path, lambda settings: new_trainer(cache, settings))


@line
def test_transformers_trainer_without_callback(cache: fb.Cache, tmp_path: Path) -> Run:
    return trainer_twice(tmp_path, lambda settings: new_trainer(cache, settings, callback=False))


def read_through(dataset: CacheDataset) -> Any:
    """TRL takes datasets of Hugging Face only: one of row numbers, which reads rows on access, as the guide has it."""

    def read(asked: dict[str, list[int]]) -> dict[str, list[Tensor]]:
        rows = dataset.__getitems__(asked["row"])
        return {name: [row[name] for row in rows] for name in rows[0]}

    numbers = import_module("datasets").Dataset.from_dict({"row": list(range(len(dataset)))})
    return numbers.with_transform(read)


@line
def test_trl_sft_trainer(cache: fb.Cache, tmp_path: Path) -> Run:
    transformers, trl = import_module("transformers"), import_module("trl")
    tokenizers = import_module("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
    config = transformers.LlamaConfig(
        vocab_size=65_536, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )

    def new(settings: dict[str, Any]) -> tuple[Any, list[Step]]:
        seen: list[Step] = []

        class Recorded(trl.SFTTrainer):
            def training_step(self, model: Any, inputs: dict[str, Tensor], *others: Any) -> Tensor:
                seen.append(step_of(inputs, "input_ids"))
                return super().training_step(model, {k: v for k, v in inputs.items() if k != "coin"}, *others)

        collate = TokenBatch(cache, labels="unshifted")
        dataset = new_dataset(cache, collate=collate, names={**NAMES, "position_ids": "positions"})
        options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False, "bf16": False}
        arguments = trl.SFTConfig(**settings, **options, gradient_checkpointing=False, max_length=None)
        trainer = Recorded(
            transformers.LlamaForCausalLM(config), args=arguments, train_dataset=read_through(dataset),
            processing_class=tokenizer, data_collator=transformers.default_data_collator,
            callbacks=[set_epoch(dataset)],
        )  # fmt: skip
        return trainer, seen

    return trainer_twice(tmp_path, new)


@line
def test_grain_map_dataset(cache: fb.Cache, tmp_path: Path) -> Run:
    grain = import_module("grain.python")

    def batches(dataset: CacheDataset) -> Any:
        rows = grain.MapDataset.source(dataset).seed(3).shuffle().repeat(3).to_iter_dataset()
        return iter(rows.batch(BATCH, batch_fn=torch.utils.data.default_collate))

    def run(stream: Any, steps: int) -> list[Step]:
        return [step_of(batch) for batch in islice(stream, steps)]

    def new() -> Any:
        return batches(new_dataset(cache, names={"tokens": "tokens", "coin": "coin"}))

    stopped, resumed = new(), new()
    first = run(stopped, STOP)
    resumed.set_state(stopped.get_state())
    return run(new(), STEPS), first, run(resumed, STEPS - STOP)


def plain_dataloader(cache: fb.Cache, context: str) -> Run:
    """One worker process for all runs. A DataLoader has no state, so a resumed run begins an epoch, in any process."""
    dataset = new_dataset(cache)
    loader = DataLoader(
        dataset, BATCH, shuffle=True, num_workers=1, multiprocessing_context=context, persistent_workers=True
    )

    def run(steps: int, epoch: int = 0) -> list[Step]:
        torch.manual_seed(0)
        seen: list[Step] = []
        while len(seen) < steps:
            dataset.set_epoch(epoch)
            seen += map(step_of, islice(loader, steps - len(seen)))
            epoch += 1
        return seen

    return run(STEPS), run(STOP), run(STEPS - STOP, epoch=STOP // EPOCH)


@line
def test_dataloader_with_forked_workers(cache: fb.Cache, tmp_path: Path) -> Run:
    return plain_dataloader(cache, "fork")


@line
def test_dataloader_with_spawned_workers(cache: fb.Cache, tmp_path: Path) -> Run:
    return plain_dataloader(cache, "spawn")


def test_each_line_has_a_test() -> None:
    assert all(re.search(r"`test_\w+\.py::test_\w+` \|$", line) for line in table_lines())
