"""A small fault campaign, which must lead to no finding; `python -m forebay.testing.campaign` runs a longer one."""

import subprocess
import sys

import pytest
from tests.builders import script_environment

from forebay.testing.campaign.syscalls import SUPPORTED


@pytest.mark.skipif(not SUPPORTED, reason="kills at system calls need ptrace on Linux for x86-64")
def test_two_minutes_of_faults_lead_to_no_finding() -> None:
    asked = ["--seed", "1", "--minutes", "2", "--faults", "400", "--processes", "1", "--all"]
    command = [sys.executable, "-m", "forebay.testing.campaign", *asked]
    run = subprocess.run(command, env=script_environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)
