"""A few real calls on an installed forebay: `python smoke.py EXTRA`, run by check_wheel.py in a clean environment.

With every extra, the core builds, reads and verifies, in Python and on the command line, and every public name either
exists or raises an error with the extra to install.
"""

import json
import subprocess
import sys
import sysconfig
import tempfile
from importlib import import_module
from pathlib import Path

import forebay as fb

MODULES = (
    "forebay",
    "forebay.images",
    "forebay.masks",
    "forebay.sources",
    "forebay.teachers",
    "forebay.row_cache",
    "forebay.torch",
)
COMMAND = Path(sysconfig.get_path("scripts")) / "forebay"


def main(extra: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        core(Path(folder))
        public_names()
        if extra != "core":
            SMOKES[extra](Path(folder))


def core(folder: Path) -> None:
    """A raw cache, in Python and on the command line."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"document {number} of a small set"}) + "\n" for number in range(500)))
    fb.build(folder / "raw", fb.sources.lines(data), fb.RawRecipe(), workers=2)
    cache = fb.open_cache(folder / "raw")
    assert len(cache) == 500
    assert json.loads(cache[499]["data"].tobytes())["text"].startswith("document 499")
    assert fb.verify(folder / "raw").sound
    forebay("build", "raw", str(data), "--into", str(folder / "typed"))
    forebay("verify", str(folder / "typed"))
    assert json.loads(forebay("info", str(folder / "typed"), "--json"))
    assert forebay("--version").strip().endswith(fb.__version__)


def public_names() -> None:
    """Check that each exists, or that its error has the command to install it."""
    for owner in MODULES:
        try:
            module = import_module(owner)
        except ImportError as error:
            names_an_extra(owner, error)
            continue
        for name in module.__all__:
            if (owner, name) != ("forebay", "testing"):  # contracts to inherit, for pytest
                try:
                    getattr(module, name)
                except (ImportError, fb.errors.ForebayError) as error:
                    names_an_extra(f"{owner}.{name}", error)


def names_an_extra(what: str, error: Exception) -> None:
    message = str(error)
    assert "pip install 'forebay[" in message, f"{what}: {type(error).__name__}: {message}"
    assert message.count("\n") <= 1, f"{what}: more than a line and a hint: {message}"


def tokens(folder: Path) -> None:
    """Packed GPT-2 tokens, and Parquet."""
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=64)
    fb.build(folder / "tokens", fb.sources.jsonl(folder / "data.jsonl", text="text"), recipe, workers=0)
    assert fb.open_cache(folder / "tokens").read([0, 1])["tokens"].shape == (2, 64)
    assert "document" in forebay("peek", str(folder / "tokens"))
    parquet, arrow = import_module("pyarrow.parquet"), import_module("pyarrow")
    parquet.write_table(arrow.table({"text": ["one", "two"]}), folder / "data.parquet")
    fb.build(folder / "parquet", fb.sources.parquet(folder / "data.parquet", text="text"), recipe, workers=0)


def fast(folder: Path) -> None:
    import_module("fastokens")


def images(folder: Path) -> None:
    """Letterboxed images, a contact sheet, and a row cache on disk."""
    image = import_module("PIL.Image")
    (folder / "photos").mkdir()
    for number in range(8):
        image.new("RGB", (80 + number, 60), (number * 20, 90, 160)).save(folder / "photos" / f"{number}.png")
    fb.build(folder / "images", fb.sources.images(folder / "photos"), fb.ImageRecipe(size=32), workers=0)
    assert len(fb.open_cache(folder / "images")) == 8
    forebay("peek", str(folder / "images"), "--png", str(folder / "sheet.png"))
    import_module("forebay.row_cache.lmdb_file")


def remote(folder: Path) -> None:
    """The libraries of the hub and of buckets; nothing is contacted."""
    import_module("forebay.hub")
    import_module("obstore")


def chat(folder: Path) -> None:
    """A chat template, rendered in the sandbox."""
    environment = import_module("jinja2.sandbox").ImmutableSandboxedEnvironment()
    template = environment.from_string("{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}")
    assert template.render(messages=[{"role": "user", "content": "hello"}]) == "<user>hello"
    tokens(folder)


def viewer(folder: Path) -> None:
    """The libraries of the server; no port is opened."""
    import_module("uvicorn").Config(import_module("forebay.viewer.web_app").WebApp)


def torch(folder: Path) -> None:
    """Batches of a cache, and attention over packed documents."""
    library, module = import_module("torch"), import_module("forebay.torch")
    attention = module.PackedSelfAttention(dim=32, n_head=2)
    lengths = library.tensor([[40, 24], [64, 0]], dtype=library.int32)
    assert attention(library.randn(2, 64, 32), lengths).shape == (2, 64, 32)
    dataset = module.CacheDataset(fb.open_cache(folder / "raw"))
    assert len(dataset) == 500


def teachers(folder: Path) -> None:
    """Every teacher can be imported; none is run."""
    module = import_module("forebay.torch.teachers")
    for name in module.__all__:
        getattr(module, name)


def onnx(folder: Path) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        import_module(name)


def ray(folder: Path) -> None:
    """A build by the actors of a cluster of this machine."""
    library = import_module("ray")
    library.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    fb.build(folder / "by-actors", fb.sources.lines(folder / "data.jsonl"), fb.RawRecipe(), workers=2, engine="ray")
    library.shutdown()
    assert len(fb.open_cache(folder / "by-actors")) == 500


EACH = (tokens, fast, images, remote, chat, viewer, torch, teachers, onnx, ray)
SMOKES = {call.__name__: call for call in EACH}


def forebay(*arguments: str) -> str:
    ran = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"forebay {' '.join(arguments)}: {ran.stderr}"
    return ran.stdout


if __name__ == "__main__":
    main(sys.argv[1])
