"""The table of the training guide that says which loaders and trainers resume exactly: each line is run.

A run has an epoch and a half; it is stopped in the second epoch and resumed from what its trainer saved. A line says
`exact` where rows, or random choices of a transform, are those of the run that was not stopped.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.token_caches import token_cache
from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader

import forebay as fb
from forebay.order.orders import Coins
from forebay.torch import CacheDataset, Loader

GUIDE = Path(__file__).parents[2] / "docs" / "guide-training.md"
ROWS, BATCH, STOP, STEPS = 64, 8, 10, 12  # eight batches in an epoch
EPOCH = ROWS // BATCH
Step = tuple[list[int], list[float]]  # the rows of a batch, and what was drawn for them
Run = tuple[list[Step], list[Step], list[Step]]  # not stopped; until it stopped; the rest


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(token_cache(tmp_path_factory.mktemp("tokens"), ROWS))


def drawn(batch: dict[str, Tensor], coins: Coins) -> dict[str, Tensor]:
    return batch | {"coin": torch.from_numpy(coins.uniform("coin"))}


def step_of(batch: dict[str, Tensor], tokens: str = "tokens") -> Step:
    """A row of numbered tokens begins with its number."""
    return batch[tokens][:, 0].tolist(), batch["coin"].tolist()


def new_loader(cache: fb.Cache) -> Loader:
    return Loader(cache, global_batch_size=BATCH, seed=3, transform=drawn, threads=1)


def new_dataset(cache: fb.Cache, **options: Any) -> CacheDataset:
    return CacheDataset(cache, transform=drawn, seed=3, **options)


def loader_alone(cache: fb.Cache, folder: Path) -> Run:
    stopped, resumed = new_loader(cache), new_loader(cache)
    first = [step_of(batch) for batch in stopped.forever(STOP)]
    resumed.load_state_dict(stopped.state_dict())
    rest = [step_of(batch) for batch in resumed.forever(STEPS - STOP)]
    return [step_of(batch) for batch in new_loader(cache).forever(STEPS)], first, rest


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
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module.seen


def lightning_twice(data: Callable[[], Any], folder: Path) -> Run:
    whole = lightning_run(data(), folder, STEPS)
    return whole, lightning_run(data(), folder, STOP), lightning_run(data(), folder, STEPS, folder / "last.ckpt")


def lightning_loader(cache: fb.Cache, folder: Path) -> Run:
    class Rows(import_module("lightning").LightningDataModule):
        def train_dataloader(self) -> Loader:
            return new_loader(cache)

    return lightning_twice(Rows, folder)


def lightning_dataset(cache: fb.Cache, folder: Path) -> Run:
    return lightning_twice(lambda: DataLoader(new_dataset(cache), batch_size=BATCH), folder)


def accelerate_loader(cache: fb.Cache, folder: Path) -> Run:
    accelerate = import_module("accelerate")

    def run(steps: int, resume: bool = False) -> list[Step]:
        accelerator, loader = accelerate.Accelerator(cpu=True), new_loader(cache)
        accelerator.register_for_checkpointing(loader)
        if resume:
            accelerator.load_state(str(folder / "state"))
        seen = [step_of(batch) for batch in loader.forever(steps)]
        accelerator.save_state(str(folder / "state"))
        return seen

    return run(STEPS), run(STOP), run(STEPS - STOP, resume=True)


def accelerate_dataset(cache: fb.Cache, folder: Path) -> Run:
    accelerate = import_module("accelerate")

    def run(steps: int, start: int = 0) -> list[Step]:
        accelerate.utils.set_seed(3)
        seedable = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=seedable)
        loader = accelerator.prepare(DataLoader(new_dataset(cache), batch_size=BATCH, shuffle=True))
        seen: list[Step] = []
        for epoch in range(start // EPOCH, -(-(start + steps) // EPOCH)):
            skipped = accelerate.skip_first_batches(loader, start % EPOCH if epoch == start // EPOCH else 0)
            skipped.set_epoch(epoch)
            seen += map(step_of, islice(skipped, steps - len(seen)))
        return seen

    return run(STEPS), run(STOP), run(STEPS - STOP, start=STOP)


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


def torchtitan_loader(cache: fb.Cache, folder: Path) -> Run:
    def run(loader: TitanLoader, steps: int) -> list[Step]:
        return [step_of(inputs, "input") for inputs, _ in islice(loader, steps)]

    stopped, resumed = TitanLoader(new_loader(cache)), TitanLoader(new_loader(cache))
    first = run(stopped, STOP)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        dcp.save({"dataloader": stopped}, checkpoint_id=folder / "titan")
        dcp.load({"dataloader": resumed}, checkpoint_id=folder / "titan")
        rest = run(resumed, STEPS - STOP)
    finally:
        distributed.destroy_process_group()
    return run(TitanLoader(new_loader(cache)), STEPS), first, rest


def stateful_dataloader(cache: fb.Cache, folder: Path, workers: int = 0) -> Run:
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


def stateful_workers(cache: fb.Cache, folder: Path) -> Run:
    return stateful_dataloader(cache, folder, workers=2)


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


def transformers_trainer(cache: fb.Cache, folder: Path, callback: bool = True) -> Run:
    transformers = import_module("transformers")

    def new(settings: dict[str, Any]) -> tuple[Any, list[Step]]:
        dataset, model = new_dataset(cache, labels="unshifted", names=NAMES), Recorder()
        arguments = transformers.TrainingArguments(**settings)
        callbacks = [set_epoch(dataset)] if callback else []
        return transformers.Trainer(model, arguments, train_dataset=dataset, callbacks=callbacks), model.seen

    return trainer_twice(folder, new)


def trainer_without_callback(cache: fb.Cache, folder: Path) -> Run:
    return transformers_trainer(cache, folder, callback=False)


def read_through(dataset: CacheDataset) -> Any:
    """TRL takes datasets of Hugging Face only: one of row numbers, which reads rows on access, as the guide has it."""

    def read(asked: dict[str, list[int]]) -> dict[str, list[Tensor]]:
        rows = dataset.__getitems__(asked["row"])
        return {name: [row[name] for row in rows] for name in rows[0]}

    numbers = import_module("datasets").Dataset.from_dict({"row": list(range(len(dataset)))})
    return numbers.with_transform(read)


def sft_trainer(cache: fb.Cache, folder: Path) -> Run:
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

        dataset = new_dataset(cache, labels="unshifted", names={**NAMES, "position_ids": "positions"})
        options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False, "bf16": False}
        arguments = trl.SFTConfig(**settings, **options, gradient_checkpointing=False, max_length=None)
        trainer = Recorded(
            transformers.LlamaForCausalLM(config), args=arguments, train_dataset=read_through(dataset),
            processing_class=tokenizer, data_collator=transformers.default_data_collator,
            callbacks=[set_epoch(dataset)],
        )  # fmt: skip
        return trainer, seen

    return trainer_twice(folder, new)


def grain_dataset(cache: fb.Cache, folder: Path) -> Run:
    grain = import_module("grain.python")

    def batches(dataset: CacheDataset) -> Any:
        rows = grain.MapDataset.source(dataset).seed(3).shuffle().repeat(2).to_iter_dataset()
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


def forked(cache: fb.Cache, folder: Path) -> Run:
    return plain_dataloader(cache, "fork")


def spawned(cache: fb.Cache, folder: Path) -> Run:
    return plain_dataloader(cache, "spawn")


CASES: dict[str, Callable[[fb.Cache, Path], Run]] = {
    "`Loader`": loader_alone,
    "`Loader` in a `DataModule` of Lightning": lightning_loader,
    "`Loader` in Accelerate, with `register_for_checkpointing`": accelerate_loader,
    "`Loader` behind torchtitan's `BaseDataLoader`, saved by `torch.distributed.checkpoint`": torchtitan_loader,
    "torchdata's `StatefulDataLoader`": stateful_dataloader,
    "torchdata's `StatefulDataLoader`, with workers": stateful_workers,
    "`transformers.Trainer`": transformers_trainer,
    "`transformers.Trainer` without the callback": trainer_without_callback,
    "TRL's `SFTTrainer`": sft_trainer,
    "Accelerate's `skip_first_batches`": accelerate_dataset,
    "Grain's `MapDataset`": grain_dataset,
    "plain `DataLoader`, workers by fork": forked,
    "plain `DataLoader`, workers by spawn": spawned,
    "plain `DataLoader` in Lightning": lightning_dataset,
}


def lines_of_the_table() -> dict[str, tuple[str, str]]:
    _, table = GUIDE.read_text().split("| how | rows | random choices |\n")
    lines = [line.strip("|").split("|") for line in table.split("\n\n")[0].splitlines()[1:]]
    return {name.strip(): (rows.strip(), choices.strip()) for name, rows, choices, *_ in lines}


def test_the_table_has_every_case() -> None:
    assert list(lines_of_the_table()) == list(CASES)


def said_exact(said: str) -> bool:
    """A cell begins with `exact` or with `not`."""
    (word,) = re.findall(r"^\**(exact|not)\b", said)
    return word == "exact"


def only(steps: Iterable[Step], part: int) -> list:
    return [step[part] for step in steps]


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated, please do not call:UserWarning")
@pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("name", CASES)
def test_a_line_of_the_table(name: str, cache: fb.Cache, tmp_path: Path) -> None:
    whole, first, rest = CASES[name](cache, tmp_path)
    assert (len(whole), len(first), len(rest)) == (STEPS, STOP, STEPS - STOP)
    for epoch in (whole[:EPOCH], first[:EPOCH]):
        assert sorted(row for rows in only(epoch, 0) for row in rows) == list(range(ROWS)), "an epoch has every row"
    found = [only(first + rest, part) == only(whole, part) for part in (0, 1)]
    assert found == [said_exact(cell) for cell in lines_of_the_table()[name]]
