"""Which platforms forebay runs on; and a test finds the same on every processor, however the run was started."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import TypeGuard

import pytest

import forebay

PROBE = """
import os, signal, subprocess, sys
def test_probe():
    code = "import os, signal; print(os.environ['ONEDNN_MAX_CPU_ISA'], signal.getsignal(2) is signal.SIG_IGN)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["AVX512_CORE_BF16", "False"]
"""


@pytest.mark.slow
def test_a_run_that_ignores_ctrl_c_starts_processes_that_do_not(tmp_path: Path):
    (tmp_path / "test_probe.py").write_text(PROBE)
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
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


# What macOS lacks of the `os` of Linux: used only behind `hasattr`.
LINUX_ONLY = (
    "O_DIRECT", "O_PATH", "O_TMPFILE", "copy_file_range", "eventfd", "getrandom", "memfd_create", "pidfd_open",
    "posix_fadvise", "posix_fallocate", "sched_getaffinity", "sched_setaffinity", "setresuid", "splice", "unshare",
)  # fmt: skip

# Without /proc, and without what macOS lacks; psutil has been imported as what it is here, and may still read /proc.
MACOS = f"""
import sys
import click, lz4.block, ml_dtypes, msgspec, numpy, psutil, rich.console, rich.live, xxhash, zstandard
import asyncio, ctypes, mmap, multiprocessing.connection, os, pathlib, subprocess, tempfile
for name in {LINUX_ONLY!r}:
    if hasattr(os, name):
        delattr(os, name)
def hide_proc(path):
    if str(path).startswith("/proc") and "psutil" not in sys._getframe(2).f_globals["__name__"]:
        raise FileNotFoundError(2, "there is no /proc", path)
def without_proc(call):
    return lambda path, *rest, **named: hide_proc(path) or call(path, *rest, **named)
os.stat, os.readlink = without_proc(os.stat), without_proc(os.readlink)
sys.addaudithook(lambda event, arguments: hide_proc(arguments[0]) if event == "open" else None)
sys.platform = "darwin"
"""

BUILD = """
import forebay as fb
folder = pathlib.Path(sys.argv[1])
(folder / "data.txt").write_text("".join(f"line {number}\\n" for number in range(1000)))
fb.build(folder / "cache", fb.sources.lines(folder / "data.txt"), fb.RawRecipe(), workers=2, memory_limit=2 << 30)
cache = fb.open_cache(folder / "cache")
chunk = next((folder / "cache" / "layers").rglob("000000*.safetensors"))
chunk.write_bytes(chunk.read_bytes()[:-1] + b"!")
assert not fb.verify(folder / "cache").sound
fb.repair(folder / "cache")
assert fb.verify(folder / "cache").sound
print(len(cache), fb.open_cache(folder / "cache")[999]["data"].tobytes())
"""


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_a_cache_is_built_read_and_repaired_without_what_only_linux_has(tmp_path: Path):
    """Not macOS itself, but all that its `os` and its file tree lack."""
    done = _python(MACOS + BUILD, str(tmp_path))
    assert done.stdout.split(maxsplit=1) == ["1000", "b'line 999'\n"], done.stderr


def test_what_only_linux_has_is_used_behind_a_guard():
    room = Path(forebay.__file__).parent
    unguarded = []
    for path in sorted(room.rglob("*.py")):
        text = path.read_text()
        if not any(name in text for name in LINUX_ONLY):
            continue
        used = {node.attr for node in ast.walk(ast.parse(text)) if _is_of_os(node)} & set(LINUX_ONLY)
        unguarded += [f"{path}: os.{name}" for name in used if f'hasattr(os, "{name}")' not in text]
    assert not unguarded


def _is_of_os(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"


@pytest.mark.parametrize("platform", ["win32", "cygwin", "emscripten"])
def test_another_platform_is_refused_in_one_line_before_anything_is_imported(platform: str):
    blocked = "for name in ('fcntl', 'resource', 'pwd', 'numpy'): sys.modules[name] = None"
    done = _python(f"import sys; sys.platform = {platform!r}\n{blocked}\nimport forebay.torch")
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last == (
        f"ImportError: forebay runs on Linux and macOS, not on '{platform}'; on Windows, install it inside WSL 2"
    )
