"""What importing the room costs: numpy, and nothing heavier."""

import subprocess
import sys

PROBE = "import sys, forebay, forebay.masks; print([name for name in ('torch', 'PIL') if name in sys.modules])"


def test_masks_import_neither_torch_nor_pillow():
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_without_torch_the_error_has_the_install_command():
    probe = "import sys; sys.modules['torch'] = None; import forebay.torch"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    sentence = "forebay.torch needs PyTorch: pip install 'forebay[torch]'"
    assert run.stderr.rstrip().endswith(f"ModuleNotFoundError: {sentence}")
