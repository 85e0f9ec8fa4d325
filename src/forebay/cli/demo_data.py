"""Text that every machine with Python has: the modules of its standard library, as JSON lines."""

import glob
import json
import os
import sysconfig

# As a careless export leaves it: to be counted, named with its line, and survived.
BROKEN_LINE = '{"text": "a line that was cut o\n'


def write_library(path: str, names: str) -> str:
    """A broken line, and one for every module below the names passed, in the order of their paths."""
    library = sysconfig.get_path("stdlib")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(BROKEN_LINE)
        for module in sorted(_modules(library, names)):
            with open(os.path.join(library, module), encoding="utf-8", errors="replace") as source:
                file.write(json.dumps({"module": module, "text": source.read()}) + "\n")
    return path


def _modules(library: str, names: str) -> set[str]:
    """Every module that is not an empty file, relative to the library."""
    found = set()
    for top in glob.iglob(os.path.join(library, names)):
        below = glob.iglob(os.path.join(top, "**", "*.py"), recursive=True) if os.path.isdir(top) else [top]
        found |= {path for path in below if path.endswith(".py") and os.path.getsize(path)}
    return {os.path.relpath(path, library) for path in found}
