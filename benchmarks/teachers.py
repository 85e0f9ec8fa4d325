"""Teachers: reading features at any timestep, and what extraction costs beside the teacher's own forward.

Goals: `features.at` on torch, blocks checked and pages warm, batches of 64 ≥ 0.9 × the document's gather and
interpolation of a tensor in memory, and ≥ 3 × TensorStore and zarr on the same data, each in its best layout; building
a layer ≤ 10 % over the bare forwards of the same batches.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from diffusers import UNet2DConditionModel

import forebay as fb
from benchmarks.feature_layer import FeatureLayer, document_features, number_cache
from benchmarks.loader_peers import Peer, PeerFailed, environment, installed, script
from benchmarks.measure import Comparison, compare
from forebay.teachers import BUCKETS, Loaded, Lune, Output, Teacher, TeacherRecipe
from forebay.teachers.align import interpolation_errors
from forebay.torch import features

BATCH = 64
ROUND_BATCHES = 200
PEERS = (
    Peer("TensorStore", "peer_features_tensorstore.py", ("tensorstore", "numpy")),
    Peer("zarr", "peer_features_zarr.py", ("zarr", "numpy")),
)

Moments = list[tuple[torch.Tensor, torch.Tensor]]


def main() -> None:
    options = _options()
    data = options.folder / "teachers"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    try:
        if options.models:
            extraction(data)
            held_out(data)
            return
        cache = _built(data, options.rows)
        moments = _moments(options.rows)
        for comparison in in_memory(cache, moments):
            print(comparison, flush=True)
        against_peers(cache, moments, data, options)
        extraction(data)
        held_out(data)
    finally:
        shutil.rmtree(data)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    below = Path(os.environ.get("FOREBAY_BENCH_DIR", tempfile.gettempdir())) / "forebay-bench"
    parser.add_argument("--rows", type=int, default=4_000, help="of float16 [10, 1280], 25.6 kB each")
    parser.add_argument("--models", action="store_true", help="only what runs a model")
    parser.add_argument("--seconds", type=float, default=5, help="for each layout of a peer")
    parser.add_argument("--folder", type=Path, default=below, help="outside the repository")
    parser.add_argument("--environments", type=Path, default=below / "environments", help="of the peers; kept")
    return parser.parse_args()


def _built(data: Path, rows: int) -> fb.Cache:
    number_cache(data / "cache", rows)
    fb.build(data / "cache", None, FeatureLayer(), layer="lune", workers=0)
    return fb.open_cache(data / "cache")


def _moments(rows: int) -> Moments:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randint(0, rows, (BATCH,), generator=generator), torch.rand(BATCH, generator=generator))
        for _ in range(ROUND_BATCHES)
    ]


def in_memory(cache: fb.Cache, moments: Moments) -> Iterator[Comparison]:
    """Against a tensor of torch's own memory, as the document holds it; with one thread of torch, and with all."""
    held = torch.cat([torch.from_numpy(np.asarray(part["lune"]).copy()) for part in cache.chunks(["lune"])])
    document, ours = document_features(held), features(cache, "lune")
    for rows, t in moments:  # every block is checked, every page touched
        if not torch.allclose(ours.at(rows, t)["lune"].values, document(rows, t), atol=1e-4):
            raise AssertionError("the features differ; timing them would compare different things")
    for chunk in range(0, len(cache), BATCH):
        ours.at(torch.arange(chunk, min(chunk + BATCH, len(cache))), 0.5)
    threads = torch.get_num_threads()
    for count in dict.fromkeys((1, threads)):
        torch.set_num_threads(count)
        name = f"features.at, batches of {BATCH}, {count} thread(s) / the document's, in memory"
        yield compare(
            name,
            lambda: _all(lambda rows, t: ours.at(rows, t), moments),
            lambda: _all(document, moments),
            amount=len(moments),
            unit="batches",
            goal=0.9,
        )
    torch.set_num_threads(threads)


def against_peers(cache: fb.Cache, moments: Moments, data: Path, options: argparse.Namespace) -> None:
    plain = data / "features"
    with open(plain, "wb") as file:
        for part in cache.chunks(["lune"]):
            file.write(np.asarray(part["lune"]).tobytes())
    ours = features(cache, "lune")
    for peer in PEERS:
        try:
            rate = _rate(lambda: _all(lambda rows, t: ours.at(rows, t), moments), len(moments))
            layouts = _peer(peer, plain, data, len(cache), options)
        except PeerFailed as failed:
            print(failed, flush=True)
            continue
        for layout, reached in layouts.items():
            print(f"  {peer.name}, {layout:<34} {reached:10,.1f} batches/s", flush=True)
        best = max(layouts.values())
        name = f"features.at / {installed(peer, options.environments)}, best layout"
        print(Comparison(name, 1 / rate, 1 / best, 1, "batches", 3.0), flush=True)


def _peer(peer: Peer, plain: Path, data: Path, rows: int, options: argparse.Namespace) -> dict[str, float]:
    python, folder = environment(peer, options.environments), data / peer.script.removesuffix(".py")
    try:
        script(peer, python, "write", plain, folder)
        lines = script(peer, python, "read", folder, rows, options.seconds).splitlines()
        read = [json.loads(line) for line in lines if line.startswith("{")]
        return {line["layout"]: line["batches_per_second"] for line in read}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class States(Teacher, frozen=True, kw_only=True, tag="benchmark-states"):
    """States of prompts, without an encoder."""

    prompted: ClassVar[bool] = True
    depends_on: ClassVar[Literal["sample", "prompt", "nothing"]] = "prompt"

    def layer_name(self) -> str:
        return "text"

    def outputs(self) -> tuple[Output, ...]:
        return (Output("text_states", (16, 64)),)

    def load(self, device: str, dtype: str) -> Loaded:
        return lambda batch: {"text_states": batch.noise((16, 64))}


def extraction(data: Path, rows: int = 64, batch: int = 4) -> None:
    """A whole build of a Lune layer against the bare model on tensors that are ready, as far as Lune listens."""
    torch.manual_seed(0)
    _small_unet().save_pretrained(data / "unet")
    number_cache(data / "prompts", rows)
    fb.build(data / "prompts", None, TeacherRecipe(teacher=States(), prompt_column="id"))
    teacher = Lune(unet=str(data / "unet"), text="text_states")
    recipe = TeacherRecipe(teacher=teacher, batch_size=batch, device="cpu")
    unet = UNet2DConditionModel.from_pretrained(data / "unet").eval()
    unet.mid_block.register_forward_hook(_stop)
    latents, states = torch.randn(batch, 4, 32, 32), torch.randn(batch, 16, 64)
    published = len(list((data / "prompts" / "generations").iterdir()))

    @torch.inference_mode()
    def bare() -> None:
        for _ in range(rows // batch):
            for moment in BUCKETS:
                with suppress(_Stopped):
                    unet(latents, torch.full((batch,), 1000 * moment), states)

    def built() -> None:
        fb.build(data / "prompts", None, recipe)

    def before() -> None:
        shutil.rmtree(data / "prompts" / "layers" / "lune", ignore_errors=True)
        for path in sorted((data / "prompts" / "generations").iterdir())[published:]:
            path.unlink()

    name = f"building a Lune layer of {rows} rows at {len(BUCKETS)} buckets / the bare forwards"
    print(compare(name, built, bare, amount=rows, unit="rows", goal=1 / 1.1, before=before, rounds=3), flush=True)


def held_out(data: Path, rows: int = 32) -> None:
    """The error of reading halfway between buckets, with noise drawn for each bucket and one noise for a sample."""
    cache = fb.open_cache(data / "prompts")
    kinds: tuple[Literal["bucket", "sample"], ...] = ("bucket", "sample")
    for per in kinds:
        teacher = Lune(unet=str(data / "unet"), text="text_states", noise_per=per)
        recipe = TeacherRecipe(teacher=teacher, batch_size=4, device="cpu")
        for error in interpolation_errors("lune", recipe, cache, rows):
            print(f"noise per {per}: {error}", flush=True)
        recipe.release()


class _Stopped(Exception):
    """The middle was reached; Lune looks no further."""


def _stop(*_: object) -> None:
    raise _Stopped


def _small_unet() -> UNet2DConditionModel:
    """Small for a UNet; its forward takes tens of milliseconds, a hundredth of a real one's."""
    return UNet2DConditionModel(
        sample_size=32, block_out_channels=(64, 128), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=64, attention_head_dim=8,
        layers_per_block=1,
    )  # fmt: skip


def _all(read: Callable[[torch.Tensor, torch.Tensor], object], moments: Moments) -> None:
    for rows, t in moments:
        read(rows, t)


def _rate(call: Callable[[], None], amount: int) -> float:
    call()
    started = time.perf_counter()
    call()
    return amount / (time.perf_counter() - started)


if __name__ == "__main__":
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}")
    main()
