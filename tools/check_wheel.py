"""Install a wheel in clean environments, the core alone and with each extra, and run smoke.py in each.

    python tools/check_wheel.py dist/forebay-0.1.0-cp311-abi3-manylinux_2_17_x86_64.whl --extras core,tokens,images

A wheel whose tag PyPI rejects is an error. Prints one line per environment; exit code 1 where one fails.
`--constraint` fixes the versions, without it they are the newest. An environment is removed before the next is made.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMOKE = Path(__file__).with_name("smoke.py")
EXTRAS = (
    "core", "tokens", "fast", "images", "remote", "chat", "viewer", "torch", "teachers", "onnx", "ray",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Install a wheel in clean environments and try it.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--extras", default=",".join(EXTRAS), help=f"Of: {', '.join(EXTRAS)}.")
    parser.add_argument("--constraint", type=Path, help="A file with the versions to install.")
    arguments = parser.parse_args()
    if problem := rejected_by_pypi(arguments.wheel.name):
        parser.error(problem)
    extras = arguments.extras.split(",")
    unknown = sorted(set(extras) - set(EXTRAS))
    if unknown:
        parser.error(f"unknown extra '{unknown[0]}'; choose from {', '.join(EXTRAS)}")
    failures = [extra for extra in extras if not works(arguments.wheel.resolve(), extra, arguments.constraint)]
    return 1 if failures else 0


def rejected_by_pypi(name: str) -> str:
    """Why PyPI rejects a wheel of this name, or '': a bare linux tag lacks the version of the C library."""
    platforms = name.removesuffix(".whl").rpartition("-")[2].split(".")
    bare = [platform for platform in platforms if platform.startswith("linux_")]
    return (
        f"PyPI rejects the tag '{bare[0]}' of '{name}'; `make wheel` names it manylinux with auditwheel" if bare else ""
    )


def works(wheel: Path, extra: str, constraint: Path | None) -> bool:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "venv" / "bin" / "python"
        wanted = str(wheel) if extra == "core" else f"{wheel}[{extra}]"
        fixed = [] if constraint is None else ["--constraint", str(constraint.resolve())]
        steps = {
            "venv": [sys.executable, "-m", "venv", str(python.parent.parent)],
            "install": [str(python), "-m", "pip", "install", "--quiet", *fixed, wanted],
            "pip check": [str(python), "-m", "pip", "check"],
            "smoke": [str(python), "-I", str(SMOKE), extra],
        }
        for name, command in steps.items():
            ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if ran.returncode:
                print(f"{extra:<10} FAILED at {name}\n{ran.stdout}{ran.stderr}", flush=True)
                return False
        installed = subprocess.run(
            [*steps["pip check"][:-1], "list"], capture_output=True, text=True, check=True
        ).stdout
    packages = len(installed.splitlines()) - 4  # two lines of heading, pip and setuptools
    print(f"{extra:<10} ok  {packages:>3} packages  {time.monotonic() - begun:>4.0f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
