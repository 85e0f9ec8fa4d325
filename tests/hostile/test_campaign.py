"""A small fault campaign, which must lead to no finding; `python -m tests.campaign` runs a longer one."""

import subprocess
import sys

import pytest
from tests.campaign.syscalls import SUPPORTED
from tests.helpers.builders import script_environment

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="kills at system calls need ptrace on Linux for x86-64")


@pytest.mark.slow
def test_a_few_faults_of_every_class_lead_to_no_finding() -> None:
    run_campaign("--seed", "1", "--each", "1", "--minutes", "5", "--processes", "1")


@pytest.mark.long
def test_two_minutes_of_faults_lead_to_no_finding() -> None:
    run_campaign("--seed", "2", "--minutes", "2")


def run_campaign(*asked: str) -> None:
    command = [sys.executable, "-m", "tests.campaign", *asked, "--all"]
    run = subprocess.run(command, env=script_environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    print(run.stdout)
