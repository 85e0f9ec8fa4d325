"""Settings of the test run: threads, examples of property tests, and which tests share a process."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from tests.helpers.hypothesis_profiles import PROFILES

if TYPE_CHECKING:
    from tests.helpers.tiny_models import TinyModels

# Tests start hundreds of processes, which start twice as slowly without compiled modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes with a thread per core wait for each other
# Some virtual processors advertise AMX and fault on it. Set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Precompiled headers double the time of a single kernel, the ISA check compiles one more, the pool starts per process.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Under nohup, Ctrl-C is ignored, and child processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
for profile, share in PROFILES.items():
    settings.register_profile(profile, derandomize=True, deadline=None, max_examples=share)
settings.load_profile("steady")

# Folders whose tests share a server, a browser or models: one xdist process runs them all. Other files go one by one.
TOGETHER = ("tests/remote/", "tests/viewer/", "tests/hostile/", "tests/compat/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file = item.nodeid.partition("::")[0]
        group = next((folder for folder in TOGETHER if file.startswith(folder)), file)
        item.add_marker(pytest.mark.xdist_group(group), append=True)


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
    made: TinyModels = import_module("tests.helpers.tiny_models").save_tiny_models(tmp_path_factory.mktemp("models"))
    return made


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small models run on one thread: more of them wait for each other, on a busy machine for long."""
    torch = import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch traces and guards, without the C++ compiler after it."""
    torch, kernel = import_module("torch"), import_module("forebay.torch.attention.packed_attention")._kernel
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    kernel.cache_clear()
    yield
    kernel.cache_clear()


@pytest.fixture(params=["traced", pytest.param("C++", marks=pytest.mark.long)])
def compiler(request: pytest.FixtureRequest) -> None:
    """A kernel takes a C++ compiler ten seconds: one test has one in every run, the others in the long one."""
    if request.param == "traced":
        request.getfixturevalue("quick_compiler")
