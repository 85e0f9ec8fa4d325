"""What a test finds does not depend on the processor or on how the run was started."""

import os
import subprocess
import sys
from pathlib import Path

PROBE = """
import os, signal, subprocess, sys
def test_probe():
    code = "import os, signal; print(os.environ['ONEDNN_MAX_CPU_ISA'], signal.getsignal(2) is signal.SIG_IGN)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["AVX512_CORE_BF16", "False"]
"""


def test_a_run_that_ignores_ctrl_c_starts_processes_that_do_not(tmp_path: Path):
    (tmp_path / "test_probe.py").write_text(PROBE)
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_probe.py")]
    done = subprocess.run(
        ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *pytest],
        capture_output=True, text=True, check=False, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_torch_is_not_imported_before_the_processor_is_chosen():
    """The variable is read once, when torch is imported: nothing that pytest loads at the start may import it."""
    code = "import sys; import pytest, hypothesis, forebay, forebay.testing; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
