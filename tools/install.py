"""Install into the environment of this Python: `python tools/install.py --editable '.[dev]'` takes what pip takes.

uv unpacks packages side by side, in a quarter of the time that pip takes. It is passed where pip is configured to look
for packages. Where it cannot be had or does not succeed, pip installs the same.
"""

import os
import subprocess
import sys

# A setting of pip, and the variable by which uv knows it.
SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def uv_environment(listed: str) -> dict[str, str]:
    """Variables of uv for what `pip config list` printed: lines as `global.find-links='/opt/wheels'`."""
    found = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        variable = SETTINGS.get(name.rpartition(".")[2])
        if variable:
            separator = "," if variable == "UV_FIND_LINKS" else " "
            found[variable] = separator.join(value.strip("'\"").replace("\\n", " ").split())
    return found


def main(arguments: list[str]) -> int:
    """Install with uv, otherwise with pip; the exit code."""
    got = subprocess.run([*PIP, "install", "--quiet", "--constraint", "constraints.txt", "uv"], check=False)
    if got.returncode == 0:
        listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        # As pip does: the best version of all indexes.
        uv += ["--index-strategy", "unsafe-best-match", *arguments]
        if subprocess.run(uv, env={**uv_environment(listed), **os.environ}, check=False).returncode == 0:
            return 0
    print("==> uv did not succeed; installing with pip", file=sys.stderr)
    return subprocess.run([*PIP, "install", "--quiet", "--no-compile", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
