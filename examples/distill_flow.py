"""Distil a small flow-matching student from teachers that were asked once; it then does without them.

    python examples/distill_flow.py runs/flow --steps 200
    python examples/distill_flow.py runs/flow --steps 200 --without-teachers

The first run draws two data sets of images with captions, saves small models with random weights as `save_pretrained`
leaves real ones, and builds the caches: one model in memory at a time, Ctrl-C at any moment. Only one of the data sets
has Lune; rows of the other are absent, not zero. The same command goes on from its last checkpoint.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

import forebay as fb
from forebay.compat.tinyflux import EncodingCache, MultiSourceCache, TrainerConfig, compute_lune_loss, compute_sol_loss
from forebay.teachers import GeometricSol, Lune, TeacherRecipe
from forebay.torch import Ingredient, Loader, Mixture, distill
from forebay.torch.distill import LunePredictor, SolPrior, TeacherRows, embed_times

SIZE, LATENT = 32, 16  # pixels, and cells of latents
TEXT = 32  # width of text states
COLOURS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 200), "white": (240, 240, 240)}
SHAPES = ("circle", "square", "cross")
SPECIAL = ("<pad>", "</s>", "<s>", "<unk>")
COLUMNS = ["latents", "latents.present", "clip.present"]


def draw_images(folder: Path, count: int, offset: int) -> None:
    """Shapes on coloured ground, not all of them square, each with a sidecar that says what is to be seen."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        names, shape = list(COLOURS), SHAPES[(number + offset) % len(SHAPES)]
        ink, ground = names[number % 4], names[(number // 4 + number + 1 + offset) % 4]
        width, height = (48, 32 + 4 * (number % 5)) if number % 2 else (32, 40)
        image = Image.new("RGB", (width, height), COLOURS[ground])
        pen, box = ImageDraw.Draw(image), (width // 4, height // 4, 3 * width // 4, 3 * height // 4)
        if shape == "circle":
            pen.ellipse(box, fill=COLOURS[ink])
        elif shape == "square":
            pen.rectangle(box, fill=COLOURS[ink])
        else:
            pen.line(box, fill=COLOURS[ink], width=6)
        image.save(folder / f"{number:04d}.png")
        caption = {"caption": f"a {ink} {shape} on {ground}"}
        (folder / f"{number:04d}.json").write_text(json.dumps(caption))


def save_models(folder: Path) -> None:
    """A VAE, a text encoder and a UNet, as small as they can be, in the folders and files of real ones."""
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4, sample_size=SIZE,
    ).save_pretrained(folder / "vae")  # fmt: skip
    UNet2DConditionModel(
        sample_size=LATENT, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT, attention_head_dim=4, norm_num_groups=4,
    ).save_pretrained(folder / "unet")  # fmt: skip
    words = {word: number for number, word in enumerate((*SPECIAL, "a", "on", *COLOURS, *SHAPES))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 1)]
    )
    marks = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder / "clip")
    CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(words), hidden_size=TEXT, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=12, bos_token_id=2, eos_token_id=1, pad_token_id=0,
        )
    ).save_pretrained(folder / "clip")  # fmt: skip


def build_caches(folder: Path, count: int) -> None:
    """What is there already is not made again, nor is its model loaded."""
    if not (folder / "models").exists():
        save_models(folder / "models")
    told = {"prompt_column": "metadata", "prompt_key": "caption", "batch_size": 4}
    encodings = fb.teachers.encodings(
        vae=str(folder / "models" / "vae"), clip=str(folder / "models" / "clip"), size=SIZE, **told
    )
    lune = TeacherRecipe(teacher=Lune(unet=str(folder / "models" / "unet")), batch_timesteps=True, **told)
    sol = TeacherRecipe(teacher=GeometricSol(), **told)
    for name, layers in (
        ("shapes", {**encodings, "lune": lune, "sol": sol}),
        ("strangers", {**encodings, "sol": sol}),  # nobody asked Lune about these
    ):
        images, root = folder / "images" / name, folder / "caches" / name
        if not images.exists():
            draw_images(images, count, offset=len(name))
        fb.build(root, fb.sources.images(images), fb.ImageRecipe(size=SIZE, tags=()), workers=0)
        for report in fb.build_layers(root, layers):
            print(f"{name}: layer {report.layer}, {report.made} made, {report.present} there before", flush=True)


class Student(nn.Module):
    """A small velocity network; beside it, what it keeps of its teachers."""

    def __init__(self, lune_dim: int, channels: int = 32, time_dim: int = 32) -> None:
        super().__init__()
        self.time_dim = time_dim
        self.lune_predictor = LunePredictor(time_dim, TEXT, feature_dim=lune_dim, hidden_dim=128, signal_dim=channels)
        self.sol_prior = SolPrior(time_dim, TEXT, hidden_dim=64)
        self.condition = nn.Linear(time_dim + TEXT, channels)
        self.first, self.last = nn.Conv2d(4, channels, 3, padding=1), nn.Conv2d(channels, 4, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3))
        self.attends = nn.Parameter(torch.zeros(()))  # how much Sol's map matters

    def forward(
        self,
        x: Tensor,
        times: Tensor,
        text: Tensor,
        lune: TeacherRows | None = None,
        sol: tuple[TeacherRows | None, TeacherRows | None] = (None, None),
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The velocity, and what the student says in its teachers' stead; without teachers it goes on with that."""
        time = embed_times(times, self.time_dim)
        own_lune, own_sol = self.lune_predictor(time, text, lune), self.sol_prior(time, text, *sol)
        signal = self.condition(torch.cat([time, text], dim=-1)) + own_lune.signal
        places = distill.spatial_weights(own_sol.spatial, (LATENT, LATENT)).unsqueeze(1)
        hidden = self.first(x) * (1 + self.attends * (places - 1)) + signal[:, :, None, None]
        for block in self.blocks:
            hidden = hidden + block(silu(hidden))
        said = {"lune": own_lune.predicted, "stats": own_sol.stats_predicted, "spatial": own_sol.spatial_predicted}
        return self.last(silu(hidden)), said


class Training:
    """The student and all that moves with it: everything a checkpoint holds."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        kind = "without" if options.without_teachers else "with"
        self.path = folder / f"student-{kind}-teachers.pt"
        self.config = TrainerConfig(
            lune_warmup_steps=20, sol_warmup_steps=20, use_spatial_weighting=True, seed=options.seed
        )
        self.teaches = not options.without_teachers
        caches = [fb.open_cache(folder / "caches" / name, layers=["latents"]) for name in ("shapes", "strangers")]
        self.caches, self.encodings = caches, [EncodingCache(cache) for cache in caches]
        self.teachers = MultiSourceCache()
        for number, cache in enumerate(caches):
            self.teachers.add(cache, dataset_id=number)
        mixture = Mixture.of([Ingredient(cache, weight=0.5) for cache in caches], seed=options.seed)
        self.loader = Loader(mixture, global_batch_size=options.batch, columns=COLUMNS, threads=1)
        self.student = Student(lune_dim=caches[0].column("lune").shape[-1])
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=options.learning_rate)
        self.done = 0

    def step(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """One batch. Times and noise are a function of the seed and the step, so that a resumed run draws the same.

        Rows without latents or without a caption hold no numbers to learn from: they are left out.
        """
        known = batch["latents.present"] & batch["clip.present"]
        if not known.any():
            self.done += 1
            return {}
        batch = {name: values[known] for name, values in batch.items()}
        local, dataset = batch["local_index"], batch["dataset_id"]
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.done)
        times = distill.sample_times(len(local), shift=self.config.shift, generator=generator)
        data = batch["latents"].float()
        noise = torch.randn(data.shape, generator=generator)
        lune, (stats, spatial) = self.taught(local, dataset, times) if self.teaches else (None, (None, None))
        x = distill.interpolate(data, noise, times)
        predicted, said = self.student(x, times, self.text(local, dataset), lune, (stats, spatial))
        parts = {
            "flow": distill.flow_loss(
                predicted,
                distill.velocity(data, noise),
                weights=self.config.loss_weights(spatial, self.content(local, dataset), (LATENT, LATENT)),
                row_weights=distill.min_snr_weight(times, self.config.min_snr_gamma),
            )
        }
        loss = parts["flow"]
        if lune is not None and stats is not None and spatial is not None:
            parts["lune"] = compute_lune_loss(said["lune"], lune, self.config.lune_loss_mode)
            parts["sol"] = compute_sol_loss(said["stats"], said["spatial"], stats, spatial)
            loss = loss + self.config.lune(self.done) * parts["lune"] + self.config.sol(self.done) * parts["sol"]
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return {"loss": loss.item(), **{name: part.item() for name, part in parts.items()}}

    def taught(
        self, local: Tensor, dataset: Tensor, times: Tensor
    ) -> tuple[TeacherRows, tuple[TeacherRows, TeacherRows]]:
        """What the teachers say at these times, but for the samples that go without this step."""
        lune, (stats, spatial) = (
            self.teachers.get_lune(local, dataset, times),
            self.teachers.get_sol(local, dataset, times),
        )
        assert lune is not None
        assert stats is not None
        assert spatial is not None
        samples, ids = self.teachers.sample_keys(local, dataset), dataset.numpy()
        keep_lune = self.config.dropout("lune").kept("lune", self.done, samples, ids)
        keep_sol = self.config.dropout("sol").kept("sol", self.done, samples, ids)
        return lune.where(keep_lune), (stats.where(keep_sol), spatial.where(keep_sol))

    def text(self, local: Tensor, dataset: Tensor) -> Tensor:
        found = torch.empty(len(local), TEXT)
        for number, encodings in enumerate(self.encodings):
            here = dataset == number
            found[here] = encodings.clip_pooled[local[here]].float()
        return found

    def content(self, local: Tensor, dataset: Tensor) -> Tensor:
        """The share of each cell that is image, not letterbox."""
        found = torch.empty(len(local), LATENT, LATENT)
        for number, cache in enumerate(self.caches):
            here = dataset == number
            found[here] = torch.from_numpy(fb.teachers.weights_of_latents(cache, local[here].numpy()))
        return found

    @torch.no_grad()
    def sample(self, count: int, steps: int = 20) -> Tensor:
        """Latents out of noise, for the captions of the first rows. No teacher is asked."""
        x = torch.randn(count, 4, LATENT, LATENT, generator=torch.Generator().manual_seed(1))
        text = self.encodings[0].clip_pooled[torch.arange(count)].float()
        for step in range(steps):
            x = x + self.student(x, torch.full((count,), step / steps), text)[0] / steps
        return x

    def save(self) -> None:
        """Whole or not at all: a kill while writing leaves the checkpoint before."""
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


def train(folder: Path, options: argparse.Namespace) -> None:
    run = Training(folder, options)
    run.resume()
    while run.done < options.steps:
        for batch in run.loader:
            losses = run.step(batch)
            print(f"step {run.done} " + " ".join(f"{name} {loss:.9g}" for name, loss in losses.items()), flush=True)
            if run.done % options.save_every == 0 or run.done == options.steps:
                run.save()
            if run.done == options.steps:
                break
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
