"""What a test has to tell, beside whether it passed, is printed at the end of the run.

Property tests draw the same examples in every run, so that a run says something about the change it is made for;
`pytest --hypothesis-profile=default` draws new ones, and `--hypothesis-profile=long` twenty times as many. torch gets
one thread, also in processes that tests start: two processes of tests with a thread per core each wait for one another.

What a test finds does not depend on the machine: virtual processors may show AMX and fault on its instructions, so
that computing in bfloat16 ends with SIGILL. oneDNN is asked to leave AMX alone, before torch is imported and also in
processes that tests start. Under nohup and in a script's background Ctrl-C is ignored, which processes inherit; here it
is not. Compiled modules are kept, whatever the environment asks for: a process that compiles all that it imports begins
twice as slowly, and tests start hundreds.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from tests.examples import PROFILES
from tests.side_by_side import pytest_addoption, pytest_collection_modifyitems, pytest_runtestloop
from tests.warm_process import WarmWorker

if TYPE_CHECKING:
    from tests.tiny_models import TinyModels

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_runtestloop"]  # hooks

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault(
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0"
)  # twice the time of one kernel, which a run has
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # no kernel is compiled to try what the processor says it can do
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # otherwise every process of tests starts a pool
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a handler is not inherited: children begin without it
for profile, share in PROFILES.items():
    settings.register_profile(profile, derandomize=True, deadline=None, max_examples=share)
settings.load_profile("steady")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every property `told`, also of tests that ran in another process."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "told" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {value}")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> "TinyModels":
    """Small models with random weights, saved once for all tests."""
    made: TinyModels = import_module("tests.tiny_models").save_tiny_models(tmp_path_factory.mktemp("models"))
    return made


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small models run on one thread: more of them wait for each other, on a busy machine for long."""
    torch = import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Where a worker is a fresh interpreter, as users have it: its beginning, its end or its memory is looked at, or whether
# its bytes are those of another process, which hashes strings otherwise; or libraries read the environment at import.
FRESH = (
    "tests/engine/",
    "tests/hub/",
    "tests/property/",
    "tests/remote/",
    "tests/teachers/test_teacher_recipe.py",
    "tests/building/test_task.py",
    "tests/chat/test_chat_builds.py",
    "tests/cli/test_cli_errors.py",
    "tests/contract/test_engines.py",
    "tests/integration/test_disk_full.py",
    "tests/integration/test_memory_limit.py",
    "tests/integration/test_token_builds.py",
    "tests/integration/test_tokens_memory.py",
    "tests/test_portability.py",
)


@pytest.fixture(scope="module", autouse=True)
def warm_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers of builds of this process are forked with everything imported. They run and make the same."""
    if sys.platform != "linux" or not request.config.getoption("processes") or request.node.nodeid.startswith(FRESH):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        started = SimpleNamespace(Popen=WarmWorker, DEVNULL=subprocess.DEVNULL)
        patch.setattr("forebay.engine.local.subprocess", started)
        yield


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch traces and guards, without the C++ compiler after it."""
    torch, kernels = import_module("torch"), import_module("forebay.torch.attention.backends")._kernels
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    kernels.clear()
    yield
    kernels.clear()


@pytest.fixture(params=["traced", pytest.param("C++", marks=pytest.mark.long)])
def compiler(request: pytest.FixtureRequest) -> None:
    """A kernel takes a C++ compiler ten seconds: one test has one in every run, the others in the long one."""
    if request.param == "traced":
        request.getfixturevalue("quick_compiler")
