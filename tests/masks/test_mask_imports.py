"""What importing the room costs: numpy, and nothing heavier."""

import subprocess
import sys

import pytest

PROBE = "import sys, forebay, forebay.masks; print([name for name in ('torch', 'PIL') if name in sys.modules])"


def test_masks_import_neither_torch_nor_pillow():
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("package", "room", "sentence"),
    [
        ("torch", "forebay.torch", "forebay.torch needs PyTorch: pip install 'forebay[torch]'"),
    ],
)
def test_a_missing_package_is_named_with_its_install_line(package, room, sentence):
    probe = f"import sys; sys.modules[{package!r}] = None; import {room}"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert run.stderr.rstrip().endswith(f"ModuleNotFoundError: {sentence}")
