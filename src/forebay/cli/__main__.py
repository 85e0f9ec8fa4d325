"""Entry point of `forebay` and `python -m forebay`.

Importing the verbs reads hundreds of files. A terminal shows a line before that, and an error during it is printed as
one line, too.
"""

import json
import os
import sys
from importlib import import_module
from typing import NoReturn

from forebay.preview.words import show_first_sign

SILENT = {"--json", "-q", "--quiet", "-h", "--help", "--help-all"}


def main() -> NoReturn:
    words = sys.argv[1:]
    if words and words[0].isalpha() and not SILENT.intersection(words) and _is_terminal():
        show_first_sign(f"forebay {words[0]}: starting …")
    try:
        run = import_module("forebay.cli.main").main
    except KeyboardInterrupt:
        sys.exit(130)
    except (ImportError, OSError, MemoryError) as error:
        message = ascii(" ".join(str(error).split())[:300])[1:-1] or type(error).__name__
        advice = "check the disk, the memory and the installed packages (pip check)"
        if "--json" in words:
            cannot = {"type": type(error).__name__, "message": f"cannot start: {message}", "hint": advice}
            sys.stdout.write(json.dumps({"ok": False, "error": cannot}) + "\n")
        sys.exit(f"error: cannot start: {message}\nhint: {advice}")
    run()
    raise AssertionError("click ends the process")


def _is_terminal() -> bool:
    """Whether standard error is a terminal that can erase a line."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


if __name__ == "__main__":
    main()
