"""Every Python block and every command of the README and the docs runs; those of one page share a folder, in order."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.running import run as run_here
from tests.helpers.byte_tokens import ByteTokens
from tests.helpers.photographs import write_photographs

import forebay as fb

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "docs").glob("tutorial*.md"))  # each begins in an empty folder
NAMES = ROOT / "docs" / "documents" / "names.md"
DOCUMENTS = sorted(set((ROOT / "docs" / "documents").glob("*.md")) - {NAMES})
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REMOTE = ROOT / "docs" / "guide-remote.md"  # its blocks need servers: tests/remote/test_remote_guide.py runs them
CHAT = ROOT / "docs" / "guide-chat.md"  # it continues in the folder of the tutorial, after its first section
CHAT_TUTORIAL = ROOT / "docs" / "tutorial-chat.md"
MASKS = ROOT / "docs" / "guide-masks.md"  # tests/masks/test_guide.py runs its blocks
TRAINERS = ROOT / "docs" / "trainers.md"
HOWTOS = sorted((ROOT / "docs").glob("howto-*.md"))  # their blocks read what their commands built
GUIDES = [page for page in PAGES if page not in (*TUTORIALS, *HOWTOS, REMOTE, CHAT, MASKS)]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def _blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


def _commands(page: Path) -> list[str]:
    """The `forebay` commands of a page; `make` is what runs this test."""
    return re.findall(r"^\$ (forebay .*)$", page.read_text(), re.MULTILINE)


def _run(command: str) -> None:
    """Run a command here, or by a shell where it needs one or is a long-running process itself."""
    bare = re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", command)
    if not re.search(r"[|<>&;$*?~`\\]|^forebay (demo|view)\b", bare):
        run_here(*shlex.split(command, comments=True)[1:])
        return
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(command, shell=True, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert run.returncode == 0, f"{command}\n{run.stderr}"


@pytest.fixture(scope="module")
def data_and_caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, images and token caches of the names that the pages use; one of the caches has grown."""
    root = tmp_path_factory.mktemp("data_and_caches")
    write_photographs(root / "photos")
    for name in ("part-0", "part-1", "new/part-2"):
        file = root / "data" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f'{{"text": "document {number} of {name}"}}\n' for number in range(2000)))
    recipe = ByteTokens(chunk_rows=128)
    fb.build(root / "caches" / "stories", fb.sources.lines(root / "data" / "part-0.jsonl"), recipe, workers=0)
    fb.update(root / "caches" / "stories", fb.sources.lines(root / "data" / "*.jsonl"), recipe=recipe, workers=0)
    fb.build(root / "caches" / "code", fb.sources.lines(root / "data" / "new"), recipe, workers=0)
    return root


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build starts as many workers as there are cores: one, so that half as many interpreters import."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)


@pytest.fixture
def folder(data_and_caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these data and caches, as the current folder."""
    monkeypatch.chdir(shutil.copytree(data_and_caches, tmp_path, dirs_exist_ok=True))
    return tmp_path


@pytest.mark.parametrize("page", [page for page in GUIDES if _commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, folder: Path) -> None:
    for command in _commands(page):
        _run(command)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if _blocks(page)], ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run(page: Path, folder: Path) -> None:
    names: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    for number, block in enumerate(_blocks(page)):
        exec(compile(block, f"{page.name} block {number}", "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("page", [*TUTORIALS, CHAT], ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom_in_an_empty_folder(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if page == CHAT:
        exec(compile("\n".join(_blocks(CHAT_TUTORIAL)[:2]), CHAT_TUTORIAL.name, "exec"), {})
    _run_page(page)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of trainers
@pytest.mark.parametrize("page", HOWTOS, ids=lambda page: page.name)
def test_a_howto_runs_from_top_to_bottom(page: Path, folder: Path) -> None:
    _run_page(page)


def _run_page(page: Path) -> None:
    names: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    blocks = re.findall(r"^```(python|console)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    for language, block in blocks:
        if language == "python":
            exec(compile(block, f"{page.name}: {block.splitlines()[0]}", "exec"), names)
        else:
            for command in re.findall(r"^\$ (forebay .*)$", block, re.MULTILINE):
                _run(command)


def test_links_between_pages_are_valid() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_names_of_the_documents_are_mapped_to_options_and_functions_that_exist() -> None:
    rows = re.findall(r"^\| (`.+?` .*?)\| (.+?) \|", NAMES.read_text(), re.MULTILINE)
    code = "\n".join(path.read_text() for folder in ("src", "examples") for path in (ROOT / folder).rglob("*.py"))
    reference = "\n".join(path.read_text() for path in (ROOT / "docs" / "commands").glob("*.md"))
    assert len(rows) > 50
    for theirs, ours in rows:
        row = ours.replace("the same", theirs)
        for option in re.findall(r"--[a-z-]+", row):
            assert re.search(rf"{option}(?![-\w])", reference), option
        for name in re.findall(r"`\.?([a-z_]+)`", row if row != ours else ""):
            assert name in code, name
        for name in re.findall(r"`(?:\w+\.)*([A-Z]\w+)\b", row):
            assert name in code, name


ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "src" / "forebay"


def test_contributing_lists_every_package_and_its_first_module() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)/` \|.*\| `([\w/]+\.py)`", page, re.MULTILINE))
    assert set(rows) == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for package, module in rows.items():
        assert (PACKAGE / package / module).is_file(), f"{package}/{module}"


def test_where_to_change_things_names_existing_definitions() -> None:
    rows = re.findall(r"^\| .* \| `([\w/]+\.py)` \| `(\w+)`", ARCHITECTURE.read_text(), re.MULTILINE)
    assert len(rows) >= 10
    for file, name in rows:
        defined = re.search(rf"^(def |class )?{name}\b", (PACKAGE / file).read_text(), re.MULTILINE)
        assert defined, f"{file} defines no {name}"


def test_the_write_path_of_the_architecture_has_names_that_exist() -> None:
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    block = re.search(r"### Write path.*?```(.*?)```", ARCHITECTURE.read_text(), re.DOTALL)
    named = re.findall(r"\b([A-Z]\w+)\.(\w+)", block[1] if block else "")
    assert len(named) > 12
    for owner, method in named:
        assert f"class {owner}" in source, owner
        assert f"def {method}(" in source, f"{owner}.{method}"


@pytest.mark.parametrize("page", [*DOCUMENTS, TRAINERS], ids=lambda page: page.name)
def test_tests_named_on_a_page_exist(page: Path) -> None:
    named = re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)`", page.read_text())
    assert named
    for file, name in named:
        (path,) = [path for path in (ROOT / "tests").rglob(Path(file).name) if str(path).endswith(f"/{file}")]
        assert f"def {name}(" in path.read_text(), f"{file}::{name}"


def test_every_guarantee_names_existing_tests() -> None:
    rows = re.findall(r"^\| ([1-9])\. .*$", ARCHITECTURE.read_text(), re.MULTILINE)
    assert rows == list("123456789")
    for file in re.findall(r"`(tests/[\w/.]+)`", ARCHITECTURE.read_text()):
        assert (ROOT / file).exists(), file
