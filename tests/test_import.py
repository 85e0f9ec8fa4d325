"""What `import forebay` costs, and what it does not bring along."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import forebay
import forebay.torch

# What the extras bring: each may be missing.
EXTRAS = (
    "PIL", "diffusers", "fastokens", "httpx2", "huggingface_hub", "jinja2", "lmdb", "obstore", "onnx",
    "pyarrow", "safetensors", "tokenizers", "torch", "transformers", "uvicorn", "yaml",
)  # fmt: skip
HEAVY = ("torch", "pyarrow", "ray", "PIL", "numpy", "rich", "click", "psutil", "pytest")


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_forebay_imports_no_heavy_library() -> None:
    loaded = _run(f"import sys, forebay; print([name for name in {HEAVY!r} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_building_and_reading_import_neither_torch_nor_pillow() -> None:
    code = "import sys, forebay as fb; fb.build, fb.open_cache, fb.RawRecipe, fb.sources.lines; "
    loaded = _run(code + "print([name for name in ('torch', 'PIL', 'pyarrow', 'ray') if name in sys.modules])")
    assert loaded.strip() == "[]"


@pytest.mark.slow
def test_the_command_line_works_with_the_libraries_of_the_core_alone(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("one\ntwo\n")
    verbs = (["build", "raw", "data.txt", "--into", "cache"], ["verify", "cache"], ["info", "cache"], ["peek", "cache"])
    block = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r})); sys.argv[1:] = "
    for verb in verbs:
        code = f"{block}{verb!r}\nfrom forebay.cli.__main__ import main; main()"
        ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr


def test_without_extras_every_public_name_is_there_or_names_the_extra() -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
import forebay
for name in sorted(set(forebay.__all__) - {{"testing"}}):  # contracts to inherit, for pytest
    try:
        getattr(forebay, name)
    except (ImportError, forebay.errors.ForebayError) as error:
        if "pip install 'forebay[" not in str(error):
            print(name, type(error).__name__, error)
"""
    assert _run(code) == ""


def test_every_public_name_is_there_and_documented() -> None:
    for name in forebay.__all__:
        assert getattr(forebay, name).__doc__, name


@pytest.mark.parametrize(
    "room", ["forebay", "forebay.images", "forebay.sources", "forebay.teachers", "forebay.row_cache", "forebay.torch"]
)
def test_type_checkers_and_the_reference_see_every_public_name(room: str) -> None:
    """A name that is imported on first use is also written as an import for those who only read the file."""
    module = import_module(room)
    tree = ast.parse(Path(module.__file__ or "").read_text())
    seen = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert set(module.__all__) <= seen | defined | assigned


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(forebay, "no_such_name")


def test_every_public_name_of_the_torch_room_is_there_and_documented() -> None:
    room = forebay.torch
    for name in room.__all__:
        assert getattr(room, name).__doc__, name
    assert not hasattr(room, "no_such_name")


@pytest.mark.slow
def test_without_pillow_every_name_of_the_torch_room_is_there_or_names_the_extra() -> None:
    code = """
import sys
sys.modules["PIL"] = None  # importing it fails as if it was not installed
import forebay.torch
for name in forebay.torch.__all__:
    try:
        getattr(forebay.torch, name)
    except Exception as error:
        print(f"{name}: {error}")
"""
    errors, hints = (lines[::2], lines[1::2]) if (lines := _run(code).splitlines()) else ([], [])
    assert errors
    assert len(errors) == len(hints)
    assert set(hints) == {"hint: pip install 'forebay[images]'"}


@pytest.mark.slow
def test_feeding_training_does_not_wait_for_the_compiler_of_torch() -> None:
    code = "import sys; from forebay.torch import CacheDataset, Loader, Mixture; "
    assert _run(code + "print('torch._inductor' in sys.modules)").strip() == "False"


def test_the_package_itself_runs_as_the_command_line() -> None:
    ran = subprocess.run([sys.executable, "-m", "forebay", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"forebay, version {forebay.__version__}\n"


def test_a_build_imports_only_its_own_kind(tmp_path: Path) -> None:
    """A wrong word is answered at once: old caches, which need torch, are another kind."""
    code = """
import sys
from click.testing import CliRunner
from forebay.cli.main import cli
ran = CliRunner().invoke(cli, ["build", "raw", "nothing.jsonl", "--into", "cache"])
print(ran.exit_code, "torch" in sys.modules, "PIL" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1", "False", "False"]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("fb.opencache", "open_cache"),
        ("fb.verfy", "verify"),
        ("fb.sources.jsnol", "jsonl"),
        ("fb.images.fitmany", "fit_many"),
    ],
)
def test_python_suggests_the_name_that_was_probably_meant(wrong: str, meant: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"import forebay as fb; {wrong}"], capture_output=True, text=True, check=False
    )
    assert f"Did you mean: '{meant}'?" in ran.stderr
