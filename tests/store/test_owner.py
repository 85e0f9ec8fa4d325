"""Who writes: a process is told from every other one, also from a later one with its pid."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from forebay.store.owners import Owner, this_process

NAME_ITSELF = """
import sys
from forebay.store.owners import this_process
if len(sys.argv) > 1:
    open("/proc/self/comm", "wb").write(bytes.fromhex(sys.argv[1]))
print(this_process(), flush=True)
sys.stdin.read()
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", NAME_ITSELF, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def owner_of(process: subprocess.Popen[str]) -> Owner:
    assert process.stdout is not None
    owner = Owner.parse(process.stdout.readline().strip())
    assert owner is not None
    return owner


def test_this_process_lives_and_reads_back_from_its_name():
    assert Owner.parse(str(this_process())) == this_process()
    assert this_process().pid == os.getpid()
    assert not this_process().is_dead()


def test_another_process_lives_until_it_ends():
    with start() as process:
        owner = owner_of(process)
        assert owner != this_process()
        assert owner.host == this_process().host
        assert not owner.is_dead()
    assert owner.is_dead()


def test_a_killed_process_is_dead_before_its_parent_takes_notice():
    with start() as process:
        owner = owner_of(process)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert owner.is_dead()


def test_a_process_with_a_reused_pid_is_another_one():
    earlier = replace(this_process(), started=this_process().started - 1)
    assert earlier.is_dead()


def test_nobody_here_can_say_that_a_process_of_another_host_is_dead():
    assert not Owner("0123456789ab", 2**22 - 1, 1).is_dead()
    assert Owner(this_process().host, 2**22 - 1, 1).is_dead()


@pytest.mark.parametrize("name", ["fffe80", "29205a2029"])  # no text at all; ") Z )"
def test_a_process_lives_whatever_it_calls_itself(name):
    with start(name) as process:
        assert not owner_of(process).is_dead()


@pytest.mark.parametrize(
    "text",
    ["", "host", "host-1", "host-x-1", "host-1-x", "host-1-", "-", "host--1-1", "host-²-1", "host-1-²", "host-١-1",
     "host-1-1\n", "host-0-1", "host-99999999999-1", "host-1-1-1", "a/b-1-1", f"host-{'9' * 5000}-1"],
)  # fmt: skip
def test_what_names_no_process_is_no_owner(text):
    assert Owner.parse(text) is None


def test_a_live_process_that_is_hidden_from_this_user_is_not_taken_for_dead(tmp_path):
    """What `hidepid` does to others, a user does here who may look at no process but its own."""
    code = (
        "import os; from forebay.store import owners; text = owners._text; "
        "owners._text = lambda path: '' if path.endswith('/1/stat') else text(path); "
        "here = owners.this_host(); os.getuid() or os.setuid(65534); "
        "print(owners.Owner(here, 1, 7).is_dead(), owners.Owner(here, 2**22 - 3, 7).is_dead())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False", "True"]
