"""One flipped bit, many times, in the files of each peer: does it raise, does it read right, or does it serve the bit?

    python flips.py FOLDER PEER FLIPS        prints {"refused": …, "right": …, "served": …, "died": …, "version": …}

Every file is hit in proportion to its size; each flip is read in a forked process by itself, whole, with
the checks that the peer does by default.
"""

import importlib.metadata
import io
import json
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROWS, WIDTH = 64, 1024
Write = Callable[[np.ndarray, Path], None]
Read = Callable[[Path], np.ndarray]


def rows() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 60_000, (ROWS, WIDTH)).astype(np.int32)


def write_memmap(values: np.ndarray, folder: Path) -> None:
    np.save(folder / "rows.npy", values)


def read_memmap(folder: Path) -> np.ndarray:
    return np.array(np.load(folder / "rows.npy", mmap_mode="r"))


def write_safetensors(values: np.ndarray, folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"rows": values}, folder / "rows.safetensors")


def read_safetensors(folder: Path) -> np.ndarray:
    from safetensors.numpy import load_file

    return load_file(folder / "rows.safetensors")["rows"]


def write_torch(values: np.ndarray, folder: Path) -> None:
    import torch

    torch.save({"rows": torch.from_numpy(values)}, folder / "rows.pt")


def read_torch(folder: Path) -> np.ndarray:
    import torch

    return torch.load(folder / "rows.pt", weights_only=True)["rows"].numpy()


def write_datasets(values: np.ndarray, folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"tokens": values}).save_to_disk(str(folder / "arrow"))


def read_datasets(folder: Path) -> np.ndarray:
    import datasets

    return np.asarray(datasets.load_from_disk(str(folder / "arrow")).with_format("numpy")["tokens"][:])


def write_litdata(values: np.ndarray, folder: Path) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder / "chunks"), chunk_bytes=1 << 16)
    for number, row in enumerate(values):
        writer[number] = row
    writer.done()
    writer.merge(1)


def read_litdata(folder: Path) -> np.ndarray:
    from litdata import StreamingDataset

    dataset = StreamingDataset(str(folder / "chunks"))
    return np.stack([np.asarray(dataset[number]) for number in range(len(dataset))])


def _streaming() -> object:
    import torch

    if not hasattr(torch.ops.torchvision, "nms"):  # streaming imports torchvision, whose operators a CPU build lacks
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import streaming

    return streaming


def write_mosaic(values: np.ndarray, folder: Path) -> None:
    writer = _streaming().MDSWriter
    with writer(
        out=str(folder / "mds"), columns={"tokens": f"ndarray:int32:{WIDTH}"}, size_limit=1 << 16, hashes=["sha1"]
    ) as out:
        for row in values:
            out.write({"tokens": row})


def read_mosaic(folder: Path, validate_hash: str | None = None) -> np.ndarray:
    streaming = _streaming()
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(local=str(folder / "mds"), batch_size=1, validate_hash=validate_hash)
    return np.stack([dataset[number]["tokens"] for number in range(ROWS)])


def read_mosaic_hashed(folder: Path) -> np.ndarray:
    return read_mosaic(folder, "sha1")


def write_webdataset(values: np.ndarray, folder: Path) -> None:
    import webdataset

    with webdataset.TarWriter(str(folder / "rows.tar")) as sink:
        for number, row in enumerate(values):
            held = io.BytesIO()
            np.save(held, row)
            sink.write({"__key__": f"{number:06d}", "npy": held.getvalue()})


def read_webdataset(folder: Path) -> np.ndarray:
    import webdataset

    found = webdataset.WebDataset(str(folder / "rows.tar"), shardshuffle=False).decode()
    return np.stack([sample["npy"] for sample in found])


def write_zarr(values: np.ndarray, folder: Path) -> None:
    import zarr

    array = zarr.create_array(str(folder / "rows.zarr"), shape=values.shape, chunks=(8, WIDTH), dtype=values.dtype)
    array[:] = values


def read_zarr(folder: Path) -> np.ndarray:
    import zarr

    return np.asarray(zarr.open_array(str(folder / "rows.zarr"), mode="r")[:])


def write_lance(values: np.ndarray, folder: Path) -> None:
    import lance
    import pyarrow as pa

    column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), WIDTH)
    lance.write_dataset(pa.table({"tokens": column}), str(folder / "rows.lance"))


def read_lance(folder: Path) -> np.ndarray:
    import lance

    column = lance.dataset(str(folder / "rows.lance")).to_table()["tokens"].combine_chunks()
    return column.flatten().to_numpy().reshape(-1, WIDTH)


def write_lmdb(values: np.ndarray, folder: Path) -> None:
    import lmdb

    with lmdb.open(str(folder / "lmdb"), map_size=1 << 26) as environment, environment.begin(write=True) as writing:
        for number, row in enumerate(values):
            writing.put(b"%06d" % number, row.tobytes())


def read_lmdb(folder: Path) -> np.ndarray:
    import lmdb

    with lmdb.open(str(folder / "lmdb"), readonly=True, lock=False) as environment, environment.begin() as reading:
        return np.stack([np.frombuffer(reading.get(b"%06d" % number), np.int32) for number in range(ROWS)])


def write_forebay(values: np.ndarray, folder: Path, codec: str = "none") -> None:
    import forebay as fb

    samples = folder / "samples"
    samples.mkdir()
    for number, row in enumerate(values):
        (samples / f"{number:06d}.bin").write_bytes(row.tobytes())
    recipe = fb.RawRecipe(codec=codec, chunk_bytes=1 << 16)
    fb.build(folder / "cache", fb.sources.files(samples), recipe, workers=0)
    shutil.rmtree(samples)


def write_forebay_zstd(values: np.ndarray, folder: Path) -> None:
    write_forebay(values, folder, "zstd")


def read_forebay(folder: Path) -> np.ndarray:
    import forebay as fb

    cache = fb.open_cache(folder / "cache")
    data = cache.read(range(len(cache)))["data"]
    return np.stack([np.frombuffer(data[row].tobytes(), np.int32) for row in range(len(data))])


PEERS: dict[str, tuple[Write, Read, str]] = {
    "numpy memmap": (write_memmap, read_memmap, "numpy"),
    "safetensors": (write_safetensors, read_safetensors, "safetensors"),
    "torch .pt": (write_torch, read_torch, "torch"),
    "HF datasets (Arrow)": (write_datasets, read_datasets, "datasets"),
    "LitData": (write_litdata, read_litdata, "litdata"),
    "MosaicML Streaming": (write_mosaic, read_mosaic, "mosaicml-streaming"),
    "MosaicML Streaming, validate_hash": (write_mosaic, read_mosaic_hashed, "mosaicml-streaming"),
    "WebDataset": (write_webdataset, read_webdataset, "webdataset"),
    "zarr": (write_zarr, read_zarr, "zarr"),
    "Lance": (write_lance, read_lance, "pylance"),
    "LMDB": (write_lmdb, read_lmdb, "lmdb"),
    "forebay, codec none": (write_forebay, read_forebay, "forebay"),
    "forebay, codec zstd": (write_forebay_zstd, read_forebay, "forebay"),
}


def main(folder: Path, peer: str, flips: int) -> None:
    write, read, package = PEERS[peer]
    pristine = folder / "pristine"
    shutil.rmtree(folder, ignore_errors=True)
    pristine.mkdir(parents=True)
    write(rows(), pristine)
    if outcome(read, pristine) != "right":
        raise SystemExit(f"{peer}: what was written does not read back")
    counts = dict.fromkeys(("refused", "right", "served", "died"), 0)
    for number in range(flips):
        hit = folder / "hit"
        shutil.copytree(pristine, hit)
        flip(hit, random.Random(number))
        counts[outcome(read, hit)] += 1
        shutil.rmtree(hit)
    print(json.dumps({**counts, "version": importlib.metadata.version(package)}))


def flip(folder: Path, draw: random.Random) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = draw.choices(files, [file.stat().st_size for file in files])[0]
    with path.open("r+b") as file:
        at = draw.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))


def outcome(read: Read, folder: Path) -> str:
    """Asked in a process by itself: some readers die, and none may know what another one cached."""
    pid = os.fork()
    if pid == 0:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        warnings.simplefilter("ignore")
        try:
            found = read(folder)
        except BaseException:
            os._exit(1)
        os._exit(0 if found.shape == (ROWS, WIDTH) and np.array_equal(found, rows()) else 2)
    status = os.waitpid(pid, 0)[1]
    if not os.WIFEXITED(status):
        return "died"
    return {0: "right", 1: "refused", 2: "served"}[os.WEXITSTATUS(status)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
