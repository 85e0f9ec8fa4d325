"""Every Python block and every command of the README and the docs runs; those of one page share a folder, in order."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.byte_tokens import ByteTokens
from tests.photographs import write_photographs

import forebay as fb

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


def _commands(page: Path) -> list[str]:
    """The `forebay` commands of a page; `make` is what runs this test."""
    return re.findall(r"^\$ (forebay .*)$", page.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, images and token caches of the names that the pages use; one of the caches has grown."""
    root = tmp_path_factory.mktemp("made")
    write_photographs(root / "photos")
    for name in ("part-0", "part-1", "new/part-2"):
        file = root / "data" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f'{{"text": "document {number} of {name}"}}\n' for number in range(2000)))
    recipe = ByteTokens(chunk_rows=128)
    fb.build(root / "caches" / "stories", fb.sources.lines(root / "data" / "part-0.jsonl"), recipe, workers=0)
    fb.grow(root / "caches" / "stories", fb.sources.lines(root / "data" / "*.jsonl"), recipe=recipe, workers=0)
    fb.build(root / "caches" / "code", fb.sources.lines(root / "data" / "new"), recipe, workers=0)
    return root


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own with all of that."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path, dirs_exist_ok=True))
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if _commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in _commands(page):
        run = subprocess.run(command, shell=True, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        assert run.returncode == 0, f"{command}\n{run.stderr}"


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)], ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run(page: Path, folder: Path) -> None:
    names: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    for number, block in enumerate(_blocks(page)):
        exec(compile(block, f"{page.name} block {number}", "exec"), names)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_draws_the_tree_as_it_is() -> None:
    text = (ROOT / "README.md").read_text()
    rooms = {path.name for path in (ROOT / "src" / "forebay").iterdir() if not path.name.startswith("_")}
    missing = [room for room in rooms - {"py.typed"} if room not in text]
    assert not missing
