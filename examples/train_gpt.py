"""Train a small GPT on a token cache, with attention within documents and exact resume.

    python examples/train_gpt.py caches/edu --epochs 2 --checkpoint runs/gpt.pt

The same command continues from the last checkpoint, with the same batches and losses as without interruption. After
`forebay update caches/edu …` it finishes its epoch with the old rows, and uses all rows in the next one.
"""

import argparse
import os
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

import forebay as fb
from forebay.torch import Growth, Loader, PackedSelfAttention, Schedule, Split, TokenBatch, document_block_mask

Batch = dict[str, Tensor]
DERIVE = ("positions", "num_label_tokens")


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        # No token sees another document. Without a GPU, SDPA: compiling FlexAttention would take longer than it saves.
        backend = "auto" if torch.cuda.is_available() else "dense"
        self.attention = PackedSelfAttention(dim, heads, backend=backend)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, batch: Batch, mask: BlockMask) -> Tensor:
        """The sum of the losses of labels that are not −100 (padding, and the last token of a document)."""
        x = self.tokens(batch["tokens"]) + self.positions(batch["positions"])  # positions restart per document
        for block in self.blocks:
            x = block(x, mask)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch["labels"].flatten(), reduction="sum")


class Training:
    """A model with the rest of a checkpoint."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.path = Path(options.checkpoint)
        self.cache = fb.open_cache(options.cache)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        length = self.cache.column("tokens").shape[0]
        self.model = GPT(options.vocabulary, length, options.dim, options.heads, options.layers).to(self.device)
        self.loader = Loader(
            self.cache,
            global_batch_size=options.batch,
            micro_batches=options.micro_batches,
            seed=options.seed,
            selection=Split("train", fraction=options.train_fraction),
            growth="epoch",
            on_growth=self.follow,
            collate=TokenBatch(self.cache, derive=DERIVE, max_documents=options.max_documents),
        )
        self.rows = self.loader.stream.size(self.loader.epoch)
        if not len(self.loader):
            raise SystemExit(
                f"{self.rows} rows to train on fill no batch of {options.batch}; run with a smaller --batch"
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.learning_rate)
        self.schedule = Schedule.for_loader(self.loader, epochs=options.epochs, full_estimate=options.full_rows)
        self.scheduler = LambdaLR(self.optimizer, self.schedule)
        self.parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
        }

    def follow(self, growth: Growth) -> None:
        print(f"the cache has grown: {growth}", flush=True)

    def loss(self, batch: Batch) -> Tensor:
        if (largest := int(batch["tokens"].max())) >= self.options.vocabulary:
            raise SystemExit(f"the cache has the token id {largest}; run with --vocabulary {largest + 1} or more")
        # One mask for all layers, made from the lengths where they are, then moved.
        mask = document_block_mask(batch["seq_lens"], batch["tokens"].shape[1], device=self.device)
        moved = {name: batch[name].to(self.device, non_blocking=True) for name in ("tokens", "positions", "labels")}
        return self.model(moved, mask)

    def step(self, batches: list[Batch]) -> float:
        """Return the mean loss over all labels of a step, however they are spread over micro-batches and ranks."""
        labels = self.loader.sum_over_ranks(sum(batch["num_label_tokens"] for batch in batches)).item()
        total = 0.0
        self.optimizer.zero_grad()
        for batch in batches:
            loss = self.loss(batch) / labels
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.scheduler.step()
        return total

    @torch.no_grad()
    def validate(self) -> float:
        rows = Split("validation", fraction=self.options.train_fraction)
        collate = TokenBatch(self.cache, derive=DERIVE)
        options = {"selection": rows, "shuffle": None, "drop_last": False, "collate": collate}
        total = labels = 0.0
        for batch in Loader(self.cache, global_batch_size=self.options.batch, **options):
            total += self.loss(batch).item()
            labels += batch["num_label_tokens"].item()
        return total / labels

    def save(self) -> None:
        """Save atomically: a kill while writing leaves the previous checkpoint."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".part")
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, aside)
        os.replace(aside, self.path)

    def resume(self) -> None:
        if not self.path.exists():
            return
        saved = torch.load(self.path, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        print(f"resumed at step {self.schedule.step}, epoch {self.loader.epoch}")


def train(options: argparse.Namespace) -> None:
    run = Training(options)
    run.resume()
    while run.loader.epoch < options.epochs:
        epoch = run.loader.epoch
        for batches in run.loader:
            rate, loss, step = run.scheduler.get_last_lr()[0], run.step(batches), run.schedule.step
            # The checksum is for people who compare two runs: equal batches, equal numbers.
            mark = zlib.crc32(torch.cat([batch["tokens"] for batch in batches]).numpy())
            print(f"step {step} epoch {epoch} batch {mark:08x} rate {rate:.3e} loss {loss:.9g}", flush=True)
            # Behind its last batch the loader stands in the next epoch; the checkpoint of that follows the validation.
            if step % options.save_every == 0 and run.loader.epoch == epoch:
                run.save()
        print(f"epoch {epoch} validation {run.validate():.9g}", flush=True)
        run.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache")
    parser.add_argument("--checkpoint", default="gpt.pt")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=1, help="into which a batch is split, to save memory")
    parser.add_argument("--max-documents", type=int, help="of a row, for fixed shapes")
    parser.add_argument("--train-fraction", type=float, default=0.9)
    parser.add_argument("--full-rows", type=int, help="to train on when the cache is complete, for the warm-up")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--vocabulary", type=int, default=50_257)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
