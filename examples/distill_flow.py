"""Distill a small Flux-like student from stored teacher features.

    python examples/distill_flow.py runs/flow --steps 200
    python examples/distill_flow.py runs/flow --steps 200 --without-teachers

The first run draws two data sets of images with captions, saves a Flux pipeline of small models with random weights as
`save_pretrained` leaves real ones, and builds the caches: one model in memory at a time, Ctrl-C at any moment. Only one
of the data sets has Lune; rows of the other are absent, not zero. One `Loader` reads the latents, the text and the
teachers' features at each row's t. The same command continues from its last checkpoint.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL import Image, ImageDraw
from teacher_predictors import LunePredictor, SolPrior, embed_times
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

import forebay as fb
from forebay.compat.tinyflux import compute_lune_loss, compute_sol_loss
from forebay.masks import latent_weights
from forebay.teachers import GeometricSol, TeacherRecipe
from forebay.torch import Ingredient, Loader, Mixture, Present, StoredBatch, Timed
from forebay.torch.distill import LogitNormalTimes, TeacherDropout, TeacherRows, Warmup, loss_weights, spatial_weights

SIZE, LATENT, CHANNELS = 32, 16, 4  # pixels, cells of latents on a side, and their channels
STATES, POOLED, WORDS = 24, 32, 12  # widths of text states and of pooled text, and tokens of a prompt
COLORS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 200), "white": (240, 240, 240)}
SHAPES = ("circle", "square", "cross")
SPECIAL = ("<pad>", "</s>", "<s>", "<unk>")
TEXT_COLUMNS = ("t5_states", "clip_pooled")
LUNE_WEIGHT, SOL_WEIGHT = Warmup(0.1, steps=20), Warmup(0.05, steps=20)
SHIFT, MIN_SNR_GAMMA = 3.0, 5.0


def draw_images(folder: Path, count: int, offset: int) -> None:
    """Draw shapes on colored ground, not all of them square, each with a caption in a sidecar."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        names, shape = list(COLORS), SHAPES[(number + offset) % len(SHAPES)]
        ink, ground = names[number % 4], names[(number // 4 + number + 1 + offset) % 4]
        width, height = (48, 32 + 4 * (number % 5)) if number % 2 else (32, 40)
        image = Image.new("RGB", (width, height), COLORS[ground])
        pen, box = ImageDraw.Draw(image), (width // 4, height // 4, 3 * width // 4, 3 * height // 4)
        if shape == "circle":
            pen.ellipse(box, fill=COLORS[ink])
        elif shape == "square":
            pen.rectangle(box, fill=COLORS[ink])
        else:
            pen.line(box, fill=COLORS[ink], width=6)
        image.save(folder / f"{number:04d}.png")
        caption = {"caption": f"a {ink} {shape} on {ground}"}
        (folder / f"{number:04d}.json").write_text(json.dumps(caption))


def shifted(times: Tensor, shift: float) -> Tensor:
    """Return times moved towards the data, away from both ends."""
    return (shift * times / (1 + (shift - 1) * times)).clamp(1e-4, 1 - 1e-4)


def min_snr_weight(times: Tensor, gamma: float) -> Tensor:
    """Return `min(SNR, γ) / SNR` with SNR = (t / (1 − t))², which weights times near the data, the easy ones, less."""
    return (gamma * ((1 - times) / times).square()).clamp(max=1.0)


def save_models(folder: Path) -> None:
    """Save a minimal Flux pipeline in the folders and files of a real one."""
    torch.manual_seed(0)
    words = {word: number for number, word in enumerate((*SPECIAL, "a", "on", *COLORS, *SHAPES))}
    named = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), SPECIAL, strict=True))
    tokenizers = []
    for single, special in (("<s> $A </s>", [("<s>", 2), ("</s>", 1)]), ("$A </s>", [("</s>", 1)])):
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
        tokenizers.append(PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=WORDS, **named))
    clip = CLIPTextConfig(
        vocab_size=len(words), hidden_size=POOLED, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=WORDS, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    t5 = T5Config(vocab_size=len(words), d_model=STATES, d_kv=8, d_ff=48, num_layers=2, num_heads=2)
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKL(
            block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=CHANNELS,
            up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, sample_size=SIZE, scaling_factor=0.9,
            shift_factor=0.1,
        ),
        text_encoder=CLIPTextModel(clip),
        tokenizer=tokenizers[0],
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=tokenizers[1],
        transformer=FluxTransformer2DModel(
            in_channels=4 * CHANNELS, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=STATES, pooled_projection_dim=POOLED, axes_dims_rope=(4, 6, 6),
        ),
    ).save_pretrained(folder)  # fmt: skip


def build_caches(folder: Path, count: int) -> None:
    """Existing layers are not made again, nor are their models loaded."""
    if not (folder / "flux").exists():
        save_models(folder / "flux")
    prompts = {"prompt_column": "metadata", "prompt_key": "caption", "batch_size": 4}
    layers = fb.teachers.pipeline(
        str(folder / "flux"), size=SIZE, noise="noised", max_length=WORDS, batch_timesteps=True, **prompts
    )
    layers["sol"] = TeacherRecipe(teacher=GeometricSol(), **prompts)
    for name, absent in (("shapes", ""), ("unseen", "lune")):  # the second data set was never shown to Lune
        images, root = folder / "images" / name, folder / "caches" / name
        if not images.exists():
            draw_images(images, count, offset=len(name))
        fb.build(root, fb.sources.images(images), fb.ImageRecipe(size=SIZE, tags=()), workers=0)
        chosen = {layer: recipe for layer, recipe in layers.items() if layer != absent}
        for report in fb.build_layers(root, chosen):
            print(f"{name}: layer {report.layer}, {report.built} made, {report.present} there before", flush=True)


class Block(nn.Module):
    """Joint attention of text and image, then a small network; time and pooled text modulate both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 6 * width)
        self.to_attention, self.from_attention = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = self.modulation(silu(condition))[:, None].chunk(6, dim=-1)
        projected = self.to_attention(self.norm(tokens) * (1 + scale) + shift)
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens = tokens + gate * self.from_attention(mixed)
        return tokens + gate_2 * self.network(self.norm(tokens) * (1 + scale_2) + shift_2)


class Student(nn.Module):
    """A small velocity network in the manner of Flux; next to it, the predictors of its teachers."""

    def __init__(self, lune_dim: int, width: int = 64, heads: int = 4, depth: int = 2, time_dim: int = 32) -> None:
        super().__init__()
        self.time_dim = time_dim
        self.lune_predictor = LunePredictor(time_dim, POOLED, feature_dim=lune_dim, hidden_dim=128, signal_dim=width)
        self.sol_prior = SolPrior(time_dim, POOLED, hidden_dim=64)
        self.condition = nn.Linear(time_dim + POOLED, width)
        self.image, self.text = nn.Linear(4 * CHANNELS, width), nn.Linear(STATES, width)
        self.places = nn.Parameter(0.02 * torch.randn((LATENT // 2) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.scale, self.last = nn.Linear(width, 4 * CHANNELS), nn.Linear(width, 4 * CHANNELS)
        self.attends = nn.Parameter(torch.zeros(()))  # how much Sol's map matters

    def forward(
        self,
        x: Tensor,
        times: Tensor,
        states: Tensor,
        pooled: Tensor,
        lune: TeacherRows | None = None,
        sol: tuple[TeacherRows | None, TeacherRows | None] = (None, None),
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the velocity, and the student's predictions of its teachers, which replace absent features."""
        time = embed_times(times, self.time_dim)
        lune_signal, sol_signal = self.lune_predictor(time, pooled, lune), self.sol_prior(time, pooled, *sol)
        condition = self.condition(torch.cat([time, pooled], dim=-1)) + lune_signal.signal
        cells, text = packed(x), self.text(states)
        places = spatial_weights(sol_signal.spatial, (LATENT // 2, LATENT // 2)).flatten(1).unsqueeze(-1)
        tokens = torch.cat([text, (self.image(cells) + self.places) * (1 + self.attends * (places - 1))], dim=1)
        for block in self.blocks:
            tokens = block(tokens, condition)
        velocity = self.last(tokens[:, text.shape[1] :]) + cells * self.scale(silu(condition))[:, None]
        predicted = {
            "lune": lune_signal.predicted,
            "stats": sol_signal.stats_predicted,
            "spatial": sol_signal.spatial_predicted,
        }
        return unpacked(velocity), predicted


def packed(latents: Tensor) -> Tensor:
    """Return tokens of 2 × 2 cells, `(rows, tokens, 4 · channels)`."""
    return nn.functional.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)


def unpacked(tokens: Tensor) -> Tensor:
    return nn.functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (LATENT // 2, LATENT // 2)), 2)


class Training:
    """The student with the rest of a checkpoint."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        kind = "without" if options.without_teachers else "with"
        self.path = folder / f"student-{kind}-teachers.pt"
        self.seed, self.dropout = options.seed, TeacherDropout(rate=0.1, seed=options.seed)
        self.teaches = not options.without_teachers
        self.caches = [fb.open_cache(folder / "caches" / name, layers=["latents"]) for name in ("shapes", "unseen")]
        times = LogitNormalTimes(SHIFT)  # one time per row and epoch, the same for both teachers
        features = [Timed("lune", times, direction="t0_noise"), Timed("sol", times)] if self.teaches else []
        mixture = Mixture.of([Ingredient(cache, weight=0.5) for cache in self.caches], seed=options.seed)
        self.loader = Loader(
            mixture,
            global_batch_size=options.batch,
            collate=StoredBatch(mixture, ["latents", "box", *TEXT_COLUMNS]),
            columns=["row_id", *features],
            threads=2,
        )
        self.student = Student(lune_dim=self.caches[0].column("lune").shape[-1])
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=options.learning_rate)
        self.done = 0

    def step(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """Run one batch. Noise is a function of seed and step, times of row and epoch: a resumed run draws the same.

        Rows without latents or without a caption have nothing to learn from: they are left out.
        """
        known = batch["latents.present"] & batch["t5.present"] & batch["clip.present"]
        if not known.any():
            self.done += 1
            return {}
        batch = {name: values[known] for name, values in batch.items()}
        data = batch["latents"].float()
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.done)
        if self.teaches:
            times, (lune, stats, spatial) = batch["lune.t"], self.taught(batch)
        else:
            times = shifted(torch.sigmoid(torch.randn(len(data), generator=generator)), SHIFT)
            lune = stats = spatial = None
        noise = torch.randn(data.shape, generator=generator)
        wide = times.view(-1, 1, 1, 1)
        x = (1 - wide) * noise + wide * data  # noise at t = 0, data at t = 1
        text = [batch[name].float() for name in TEXT_COLUMNS]
        predicted, estimates = self.student(x, times, *text, lune, (stats, spatial))
        errors = (predicted.float() - (data - noise)).square().mean(dim=1)  # of the velocity, (rows, height, width)
        weights = loss_weights(spatial, content(batch), (LATENT, LATENT))
        losses = (errors if weights is None else errors * weights).mean(dim=(1, 2))
        parts = {"flow": (losses * min_snr_weight(times, MIN_SNR_GAMMA)).mean()}
        loss = parts["flow"]
        if lune is not None and stats is not None and spatial is not None:
            parts["lune"] = compute_lune_loss(estimates["lune"], lune)
            parts["sol"] = compute_sol_loss(estimates["stats"], estimates["spatial"], stats, spatial)
            loss = loss + LUNE_WEIGHT(self.done) * parts["lune"] + SOL_WEIGHT(self.done) * parts["sol"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return {"loss": loss.item(), **{name: part.item() for name, part in parts.items()}}

    def taught(self, batch: dict[str, Tensor]) -> tuple[TeacherRows, TeacherRows, TeacherRows]:
        """Return the teachers' rows of a batch, without the samples that dropout leaves out in this step."""
        lune, stats, spatial = (
            TeacherRows(batch[name], batch[f"{layer}.present"])
            for name, layer in (("lune", "lune"), ("sol_stats", "sol"), ("sol_spatial", "sol"))
        )
        samples, dataset = batch["row_id"][:, 0] << 32 | batch["row_id"][:, 1], batch["dataset_id"]
        keep_lune, keep_sol = (self.dropout.keep(name, self.done, samples, dataset) for name in ("lune", "sol"))
        return lune.where(keep_lune), stats.where(keep_sol), spatial.where(keep_sol)

    @torch.no_grad()
    def sample(self, count: int, steps: int = 20) -> Tensor:
        """Return latents made of noise, for the first captions: rows without one are left out. No teacher runs."""
        captions = Present("t5", "clip").select(self.caches[0])
        rows = captions.rows(np.arange(min(count, len(captions))))
        x = torch.randn(len(rows), CHANNELS, LATENT, LATENT, generator=torch.Generator().manual_seed(1))
        shared = [self.caches[0].read(rows, [name])[name] for name in TEXT_COLUMNS]
        text = [torch.from_numpy(values).float() for values in shared]
        for step in range(steps):
            x = x + self.student(x, torch.full((len(rows),), step / steps), *text)[0] / steps
        return x

    def save(self) -> None:
        """Save atomically: a kill while writing leaves the previous checkpoint."""
        aside = self.path.with_suffix(".part")
        parts = {"student": self.student, "optimizer": self.optimizer, "loader": self.loader}
        torch.save({"done": self.done, **{name: part.state_dict() for name, part in parts.items()}}, aside)
        os.replace(aside, self.path)

    def resume(self) -> None:
        if self.path.exists():
            saved = torch.load(self.path, weights_only=True)
            self.done = saved["done"]
            for name, part in {"student": self.student, "optimizer": self.optimizer, "loader": self.loader}.items():
                part.load_state_dict(saved[name])
            print(f"resumed at step {self.done}", flush=True)


def content(batch: dict[str, Tensor]) -> Tensor:
    """Return the share of each cell that is image, not letterbox."""
    return torch.from_numpy(latent_weights(batch["box"].numpy(), (SIZE, SIZE), (LATENT, LATENT)))


def train(folder: Path, options: argparse.Namespace) -> None:
    run = Training(folder, options)
    run.resume()
    for batch in run.loader.forever(max_steps=max(0, options.steps - run.done)):
        losses = run.step(batch)
        print(f"step {run.done} " + " ".join(f"{name} {loss:.9g}" for name, loss in losses.items()), flush=True)
        if run.done % options.save_every == 0 or run.done == options.steps:
            run.save()
    latents = run.sample(4)
    print(f"sampled without teachers: mean {latents.mean():.6g}, deviation {latents.std():.6g}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--images", type=int, default=24, help="in each data set")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--without-teachers", action="store_true", help="for comparison: the velocity loss alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    build_caches(options.folder, options.images)
    train(options.folder, options)


if __name__ == "__main__":
    main()
