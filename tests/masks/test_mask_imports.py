"""What importing the room costs: numpy, and nothing heavier."""

import subprocess
import sys

PROBE = "import sys, forebay, forebay.masks; print([name for name in ('torch', 'PIL') if name in sys.modules])"


def test_masks_import_neither_torch_nor_pillow():
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
