"""Train a small ViT that tags pictures of any shape, export it with its preprocessing, and run it in onnxruntime.

    python examples/train_tagger.py runs/birds --epochs 12 --export

Draws birds of several colors, plain or striped, that face left or right; builds a cache of them, trains on it, and
tags held-out pictures with onnxruntime. The same command continues from the last checkpoint, with the same batches and
losses as without interruption. Needs pip install 'forebay[torch,images,onnx]'.
"""

import argparse
import json
import os
import random
import warnings
import zlib
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, scaled_dot_product_attention

import forebay as fb
from forebay.torch import CacheDataset, ImageBatch, LetterboxModule, Loader, Split
from forebay.torch.attention.packed_attention import join_heads, split_heads

SIZE, PATCH = 64, 8
VALUES = {"normalize": "imagenet", "dtype": torch.float32, "patch": PATCH}  # one choice, for training and export
ORIENTATION = {"looking_left": "looking_right"}  # a flipped bird looks the other way
COLORS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 200), "yellow": (220, 200, 40)}


def draw_bird(draw: random.Random) -> tuple[Image.Image, list[str]]:
    """A bird on a gray ground, in a picture that is wide or tall, large or small; and its tags."""
    width, height, gray = draw.randint(40, 200), draw.randint(40, 200), draw.randint(90, 255)
    color, pattern = draw.choice(list(COLORS)), draw.choice(["plain", "striped"])
    side, looks = draw.choice([(-1, "looking_left"), (1, "looking_right")])
    image = Image.new("RGB", (width, height), (gray, gray, gray))
    pen, unit, x, y = ImageDraw.Draw(image), min(width, height) * draw.uniform(0.25, 0.33), width / 2, height / 2
    beak = [(x + side * unit * out, y + unit * down) for out, down in ((0.8, -0.5), (1.5, 0), (0.8, 0.5))]
    pen.polygon(beak, fill=(240, 140, 20))
    pen.ellipse((x - unit, y - unit, x + unit, y + unit), fill=COLORS[color])
    pen.circle((x + side * unit * 0.5, y - unit * 0.3), unit * 0.2, fill=(255, 255, 255))
    for stripe in (-0.6, -0.2, 0.2) if pattern == "striped" else ():
        across = x - side * unit * 0.3 + stripe * unit
        pen.line((across, y - unit * 0.7, across, y + unit * 0.7), fill=(0, 0, 0), width=round(unit * 0.2))
    return image, [color, pattern, looks]


def draw_pictures(folder: Path, count: int) -> None:
    """Draw pictures with tags in sidecars: 0007.png, and 0007.json."""
    aside = folder.with_suffix(".part")
    aside.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image, tags = draw_bird(random.Random(number))
        image.save(aside / f"{number:04d}.png")
        (aside / f"{number:04d}.json").write_text(json.dumps({"tags": tags}))
    os.replace(aside, folder)


class MaskedViTBlock(nn.Module):
    """A pre-norm transformer block for the tokens of letterboxed images.

        ignore = torch.from_numpy(token_ignore_mask(boxes, (224, 224), 16)).flatten(1)
        y = block(x, ignore)             # x, y: (images, 1 + tokens, dim), x[:, 0] is CLS

    tokens     c 0 1 2 3
    ignore       . . 1 1      True = padding, as everywhere
    seen       1 1 1 . .      by every query; CLS always
    """

    def __init__(self, dim: int, n_head: int, *, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        hidden = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor, ignore: Tensor) -> Tensor:
        seen = seen_with_cls(ignore, images=x.shape[0], tokens=x.shape[1])
        heads = split_heads(self.qkv(self.norm1(x)), self.n_head)
        x = x + self.proj(join_heads(scaled_dot_product_attention(*heads, attn_mask=seen[:, None, None, :])))
        return x + self.mlp(self.norm2(x))


def seen_with_cls(ignore: Tensor, images: int, tokens: int) -> Tensor:
    """Return the keys that are seen, `[images, 1 + patches]`: CLS, and each patch that is not ignored."""
    if ignore.dtype != torch.bool or ignore.shape != (images, tokens - 1):
        raise ValueError(
            f"ignore must be bool [{images}, {tokens - 1}] for {images} images of {tokens} tokens with CLS "
            f"(got {ignore.dtype} {tuple(ignore.shape)}); flatten the token_ignore_mask of these images"
        )
    return torch.cat((ignore.new_ones(len(ignore), 1), ~ignore), dim=1)


class Tagger(nn.Module):
    """A ViT that does not see padding. A tag's score is of the CLS token, which is never ignored."""

    def __init__(self, tags: int, dim: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, PATCH, stride=PATCH)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIZE // PATCH) ** 2, dim))
        self.blocks = nn.ModuleList(MaskedViTBlock(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, tags)

    def forward(self, pixels: Tensor, token_mask: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1)
        for block in self.blocks:
            x = block(x, token_mask.flatten(1))
        return self.head(self.norm(x[:, 0]))


class PictureTagger(nn.Module):
    """The exported graph: from a decoded picture to the scores of its tags."""

    def __init__(self, cache: fb.Cache, tagger: Tagger) -> None:
        super().__init__()
        self.letterbox, self.tagger = LetterboxModule(cache, **VALUES), tagger

    def forward(self, image: Tensor) -> Tensor:
        batch = self.letterbox(image)
        return self.tagger(batch["pixels"], batch["token_mask"]).sigmoid()


class Training:
    """A model with the rest of a checkpoint."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.pictures, self.checkpoint, self.graph = folder / "pictures", folder / "tagger.pt", folder / "tagger.onnx"
        if not self.pictures.exists():
            draw_pictures(self.pictures, options.pictures)
        fb.build(folder / "cache", fb.sources.images(self.pictures), fb.ImageRecipe(size=SIZE), workers=0)
        self.cache = fb.open_cache(folder / "cache")
        # A bird has any tags, and exactly one color: batches have `tags`, and `label`, the index of its color.
        collate = ImageBatch(self.cache, flip=0.5, orientation=ORIENTATION, classes=list(COLORS), **VALUES)
        self.tags = collate.recipe.vocabulary()
        self.colors = self.tags.indices(list(COLORS)).tolist()  # where their scores are
        self.tagger = Tagger(len(self.tags))
        self.loader = Loader(
            self.cache,
            global_batch_size=options.batch,
            seed=options.seed,
            selection=Split("train"),  # by sample: a picture is on the same side in every cache
            collate=collate,
        )
        self.held_out = CacheDataset(self.cache, selection=Split("validation"))
        self.optimizer = torch.optim.AdamW(self.tagger.parameters(), lr=options.learning_rate)
        self.parts = {"tagger": self.tagger, "optimizer": self.optimizer, "loader": self.loader}
        self.step = 0

    def train_on(self, batch: dict[str, Tensor]) -> float:
        loss = self.loss(self.tagger(batch["pixels"], batch["token_mask"]), batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def loss(self, scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The loss: binary for each tag, and a softmax over the colors."""
        tags = binary_cross_entropy_with_logits(scores, batch["tags"])
        return tags + cross_entropy(scores[:, self.colors], batch["label"])

    @torch.no_grad()
    def validate(self) -> tuple[float, float, float]:
        """The loss on held-out pictures, and the accuracy of their tags and colors."""
        batch = ImageBatch(self.cache, classes=list(COLORS), **VALUES)(list(self.held_out))
        scores = self.tagger(batch["pixels"], batch["token_mask"])
        tags = ((scores > 0) == batch["tags"].bool()).float().mean()
        colors = (scores[:, self.colors].argmax(1) == batch["label"]).float().mean()
        return self.loss(scores, batch).item(), tags.item(), colors.item()

    def save(self) -> None:
        """Save atomically: a kill while writing leaves the previous checkpoint."""
        aside = self.checkpoint.with_suffix(".part")
        torch.save({"step": self.step} | {name: part.state_dict() for name, part in self.parts.items()}, aside)
        os.replace(aside, self.checkpoint)

    def resume(self) -> None:
        if not self.checkpoint.exists():
            return
        saved = torch.load(self.checkpoint, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        self.step = saved["step"]
        print(f"resumed at step {self.step}, epoch {self.loader.epoch}")

    def export(self) -> None:
        model = PictureTagger(self.cache, self.tagger).eval()
        any_size = {"image": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
        example = torch.zeros(100, 80, 3, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's exporter has some for torch
            torch.onnx.export(
                model, (example,), self.graph, dynamo=True, dynamic_shapes=any_size, external_data=False, verbose=False
            )

    @torch.no_grad()
    def compare(self) -> None:
        """Tag the held-out pictures twice: with the model from the cache, and with onnxruntime from the files."""
        session = onnxruntime.InferenceSession(self.graph, providers=["CPUExecutionProvider"])
        collate, differences = ImageBatch(self.cache, **VALUES), []
        for row in self.held_out:
            path, batch = self.pictures / bytes(row["id"]).decode(), collate([row])
            expected = self.tagger(batch["pixels"], batch["token_mask"])[0].sigmoid().numpy()
            output = session.run(None, {"image": np.asarray(Image.open(path))})[0][0]
            exported, original = (
                ", ".join(self.tags.named(np.flatnonzero(scores > 0.5))) for scores in (output, expected)
            )
            differences.append(np.abs(output - expected).max())
            print(
                f"{path.name} {exported}" if exported == original else f"{path.name} {exported} BUT IN TORCH {original}"
            )
        print(f"onnxruntime differs by {max(differences):.1e} at most from torch, on {len(differences)} pictures")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for pictures, cache, checkpoint and graph")
    parser.add_argument("--pictures", type=int, default=500, help="to draw, if there are none yet")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--export", action="store_true", help="and compare with onnxruntime")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run = Training(options.folder, options)
    run.resume()
    while (epoch := run.loader.epoch) < options.epochs:
        for batch in run.loader:
            # The checksum is for people who compare two runs: equal batches, equal numbers.
            mark, loss = zlib.crc32(batch["pixels"].numpy()), run.train_on(batch)
            print(f"step {run.step} epoch {epoch} batch {mark:08x} loss {loss:.9g}", flush=True)
            # Behind its last batch the loader stands in the next epoch; the checkpoint of that follows the validation.
            if run.step % options.save_every == 0 and run.loader.epoch == epoch:
                run.save()
        loss, tags, colors = run.validate()
        print(
            f"epoch {epoch} held out: loss {loss:.9g}, {tags:.1%} of tags and {colors:.1%} of colors right", flush=True
        )
        run.save()
    if options.export:
        run.export()
        run.compare()


if __name__ == "__main__":
    main()
