"""What `import forebay` costs, and what it does not bring along."""

import subprocess
import sys

import forebay
import forebay.torch

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
