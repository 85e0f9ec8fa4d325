"""Take the pictures of docs/guide-view.md in Chromium: `python -m tools.screenshots [docs/pictures]`.

    view-overview, view-build, view-rows, view-chat, view-preferences, view-images, view-teachers, view-training

The demo page, docs/demo.html, is a static copy of the token cache and of the conversations.

Caches are really built: docstrings of the standard library as tokens and as answers, drawn pictures, a teacher that
needs no model, log-probs of a small model that is not trained. With `--all FOLDER`, every page is also taken light and
dark at 390 and 1600 pixels, for review.
"""

import ast
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from io import BytesIO
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
from PIL import Image
from tests.chat.stock_templates import CHATML
from tests.chat.tokenizer_folders import write_folder
from tests.helpers.builders import script_environment
from tests.helpers.obedient_recipes import orders, write_orders
from tests.teachers.own_teachers import Ramp

import forebay as fb
from forebay.teachers import LogProbs, TeacherRecipe
from forebay.viewer.bundle import write_bundle
from forebay.viewer.shown_cache import ShownCache
from forebay.viewer.web_app import Server

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]  # fmt: skip
WIDTH = 1100
DEMO_ROWS = 5  # of each cache
MOST_BYTES = 150_000
PAGES = {
    "overview": ("0/overview", 1000),
    "rows": ("0/rows?row={packed}", 1300),
    "chat": ("4/rows?row=1", 1000),
    "preferences": ("5/rows?row=7", 790),
    "images": ("1/images", 800),
    "teachers": ("2/teachers?layer=ramp&row=3&t=0.42", 830),
    "training": ("0/training?world=4&seed=7&shuffle=window", 700),
}
# Where the last line that fits ends, so that a picture does not cut through one.
BOTTOM = """(most) => Math.max(...[...document.querySelectorAll('section, figure, tr, dd, .turn, .begins, .timed > *')]
  .map((one) => one.getBoundingClientRect().bottom + scrollY).filter((bottom) => bottom < most))"""
EVERY = [
    "0/overview", "0/chunks?layer=tokens&chunk=1", "0/rows?row=12", "1/images", "1/images?row=3&one=1",
    "2/teachers?layer=ramp&row=3&t=0.42", "0/training?world=4&seed=7", "1/compare?b=0", "3/chunks",
    "4/overview", "4/rows?row=1", "5/overview", "5/rows?row=7", "5/rows?row=7&color=ref_logps", "5/teachers?row=7",
]  # fmt: skip


def main(arguments: list[str]) -> None:
    every = Path(arguments[arguments.index("--all") + 1]) if "--all" in arguments else None
    out = Path(arguments[0] if arguments and not arguments[0].startswith("--") else "docs/pictures").absolute()
    with tempfile.TemporaryDirectory() as folder, import_module("playwright.sync_api").sync_playwright() as playwright:
        every = every.absolute() if every else None
        os.chdir(folder)  # so that pictures show short names
        roots = _caches(Path())
        _write_demo(roots, out.parent / "demo.html")
        browser = playwright.chromium.launch(executable_path=which("chromium"), args=FLAGS)
        shown = [ShownCache.of(root, _source() if root == roots[0] else None) for root in roots]
        server = Server(shown).start()
        try:
            page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
            packed = _packed_row(roots[0])
            for name, (view, height) in PAGES.items():
                _take(page, server, view.format(packed=packed), out / f"view-{name}.webp", height)
            _take_build(page, server, Path(), roots[3], out / "view-build.webp")
            page.close()
            if every is not None:
                _take_all(browser, server, every)
        finally:
            server.stop()
            browser.close()


def _write_demo(roots: list[Path], path: Path) -> None:
    """The demo page: rows of tokens and of conversations, with the names of documents."""
    report = write_bundle([ShownCache.of(roots[0], _source()), ShownCache.of(roots[4])], str(path), DEMO_ROWS)
    print(f"{path}  {report.bytes:,} bytes")


def _take(page: Any, server: Server, view: str, path: Path, height: int | None) -> None:
    address = f"#/{view}"
    if page.url == "about:blank":
        page.goto(f"{server.address}{address}")
    else:
        page.evaluate("(address) => { location.hash = address; }", address)
    page.wait_for_selector(f"[data-ready='{address}']", timeout=60_000)
    page.evaluate("for (const one of document.images) one.loading = 'eager'")  # those below the window too
    page.wait_for_timeout(500)
    bottom = page.evaluate(BOTTOM, height) + 1 if height else 0
    clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": bottom} if height else None
    _save(page.screenshot(full_page=True, **({"clip": clip} if clip else {})), path)


def _save(png: bytes, path: Path) -> None:
    image = Image.open(BytesIO(png)).convert("RGB")
    path.parent.mkdir(parents=True, exist_ok=True)
    for quality in (90, 80, 70, 60):
        image.save(path, quality=quality, method=6)
        if path.stat().st_size <= MOST_BYTES:
            break
    print(f"{path}  {path.stat().st_size:,} bytes")


def _take_build(page: Any, server: Server, folder: Path, root: Path, path: Path) -> None:
    """Two builders on one cache, a few seconds after they began."""
    script = (
        "import sys, forebay as fb; from tests.helpers.obedient_recipes import ObedientRecipe; "
        "fb.build(sys.argv[1], fb.sources.lines(sys.argv[2]), ObedientRecipe(seconds=0.15), workers=2, progress=False)"
    )
    command = [sys.executable, "-c", script, str(root), str(folder / "orders" / "a.txt")]
    builders = [subprocess.Popen(command, env=script_environment()) for _ in range(2)]
    try:
        page.evaluate("(address) => { location.hash = address; }", "#/3/chunks")
        page.wait_for_selector("[data-build=running]", timeout=60_000)
        page.wait_for_timeout(14_000)
        _save(page.screenshot(full_page=True), path)
    finally:
        for builder in builders:
            builder.terminate()
            builder.wait()


def _take_all(browser: Any, server: Server, folder: Path) -> None:
    for scheme in ("light", "dark"):
        for width in (390, 1600):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            for view in EVERY:
                name = view.replace("/", "-").split("?")[0] + (
                    "-one" if "one=" in view else "-color" if "color=" in view else ""
                )
                _take(page, server, view, folder / f"{name}-{scheme}-{width}.png", None)
            page.close()


def _caches(folder: Path) -> list[Path]:
    os.makedirs("raw")
    found = list(_docstrings())
    lines = [json.dumps({"text": text}) + "\n" for _, text in found]
    Path("raw/docstrings.jsonl").write_text("".join(lines[: len(lines) // 2]))
    tokens = folder / "caches" / "docstrings"
    source = _source()
    fb.build(tokens, source, fb.TokenRecipe(tokenizer="gpt2", sequence_length=512, chunk_rows=64), workers=0)
    for part in (lines[len(lines) // 2 : len(lines) * 3 // 4], [*lines[len(lines) * 3 // 4 :], "{\n"]):
        time.sleep(3)  # so that generations are apart on their line of time
        with open("raw/docstrings.jsonl", "a") as file:
            file.writelines(part)
        fb.update(tokens, source, workers=0)
    pictures = folder / "pictures"
    pictures.mkdir()
    for number in range(40):
        _draw(number).save(pictures / f"{number:03d}.jpg", quality=92)
        tags = ["portrait" if number % 4 == 1 else "landscape", *(["sunset"] if number % 3 else [])]
        (pictures / f"{number:03d}.json").write_text(json.dumps({"tags": tags, "camera": "drawn", "number": number}))
    photos = folder / "caches" / "photos"
    recipe = fb.ImageRecipe(size=224, tags=("landscape", "portrait", "sunset"), chunk_bytes=600_000)
    fb.build(photos, fb.sources.images(pictures), recipe, workers=0)
    (folder / "prompts.txt").write_text("".join(f"prompt {number} {'long ' * (number % 7)}\n" for number in range(160)))
    prompts = folder / "caches" / "prompts"
    fb.build(prompts, fb.sources.lines(folder / "prompts.txt"), fb.RawRecipe(chunk_bytes=900), workers=0)
    fb.build(prompts, None, TeacherRecipe(teacher=Ramp(width=96)))
    write_orders(folder / "orders" / "a.txt", orders(1200))
    building = folder / "caches" / "building"
    building.mkdir()
    model = _model(folder)
    return [tokens, photos, prompts, building, _chats(folder, found, model), _preferences(folder, found, model)]


def _source() -> fb.Source:
    return fb.sources.jsonl("raw/docstrings.jsonl", text="text")


def _docstrings() -> Iterator[tuple[str, str]]:
    """Names and docstrings of functions and classes of the standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-p]*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                yield f"{path.stem}.{node.name}", text


def _model(folder: Path) -> str:
    """A tokenizer with a chat template, and a model without training."""
    tokenizer = import_module("tokenizers").Tokenizer.from_str(_vocabulary(folder / "caches" / "docstrings"))
    tokenizer.add_special_tokens(list(CHATML.special))
    model = write_folder(folder / "model", tokenizer.to_str(), CHATML.plain(), CHATML.tokens)
    transformers = import_module("transformers")
    config = transformers.GPT2Config(
        vocab_size=tokenizer.get_vocab_size(), n_positions=512, n_embd=32, n_layer=1, n_head=2, initializer_range=0.6
    )
    transformers.GPT2LMHeadModel(config).eval().save_pretrained(folder / "untrained")
    return f"./{model}"


def _preferences(folder: Path, found: list[tuple[str, str]], model: str) -> Path:
    """The first paragraph of a docstring, preferred to two other answers."""
    groups = [
        {
            "prompt": f"What is {name}?",
            "candidates": [text.split("\n\n")[0], "A function.", "No idea."],
            "scores": [9, 4, 1],
        }
        for name, text in found[:80]
    ]
    (folder / "raw" / "groups.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    root = folder / "caches" / "preferences"
    recipe = fb.PreferenceRecipe(tokenizer=model, sequence_length=512, chunk_rows=20)
    fb.build(root, fb.sources.lines(folder / "raw" / "groups.jsonl"), recipe, workers=0)
    fb.build(root, None, TeacherRecipe(teacher=LogProbs(model="./untrained", over="preferences")))
    return root


def _chats(folder: Path, found: list[tuple[str, str]], model: str) -> Path:
    """Questions about the library, with the first paragraph of a docstring as the answer."""
    chats = [
        [
            {"role": "system", "content": "You explain Python's standard library."},
            {"role": "user", "content": f"What is {name}?"},
            {"role": "assistant", "content": text.split("\n\n")[0]},
            {"role": "user", "content": "Where is it?"},
            {"role": "assistant", "content": f"In the module {name.partition('.')[0]}."},
        ]
        for name, text in found[:600]
    ]
    (folder / "raw" / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    root = folder / "caches" / "chats"
    recipe = fb.ChatRecipe(tokenizer=model, sequence_length=512)
    fb.build(root, fb.sources.lines(folder / "raw" / "chats.jsonl"), recipe, workers=0)
    return root


def _vocabulary(root: Path) -> str:
    return fb.open_cache(root).constants("tokens")["tokenizer"].tobytes().decode()


def _packed_row(root: Path) -> int:
    """A row with about nine documents, and some padding where there is such a row."""
    cache = fb.open_cache(root)
    lengths = cache.read(np.arange(len(cache)), ["seq_lens"])["seq_lens"]
    padding = 512 - np.array([int(lengths[row].sum()) for row in range(len(cache))])
    return int(np.argmin(abs(np.diff(lengths.offsets) - 9) + 4 * ((padding < 4) | (padding > 100))))


def _draw(number: int) -> Image.Image:
    """A sky over hills, different for every number."""
    chance = np.random.default_rng(number)
    width, height = [(640, 420), (420, 640), (512, 512), (800, 360)][number % 4]
    y, x = np.mgrid[0:height, 0:width] / height
    low, high = chance.integers(60, 200, 3), chance.integers(120, 255, 3)
    picture = low + (high - low) * y[:, :, None]
    for depth in range(3):
        ridge = 0.45 + 0.17 * depth + 0.08 * np.sin(x * chance.uniform(3, 9) + chance.uniform(0, 6))
        picture = np.where((y > ridge)[:, :, None], chance.integers(20, 110, 3) + 18 * depth, picture)
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8))


if __name__ == "__main__":
    main(sys.argv[1:])
