"""Where the command line begins: `forebay`, and `python -m forebay` for that of this very interpreter.

Importing the verbs takes half a second and reads hundreds of files. What goes wrong meanwhile is one line too.
"""

import sys
from importlib import import_module
from typing import NoReturn


def main() -> NoReturn:
    try:
        run = import_module("forebay.cli.main").main
    except KeyboardInterrupt:
        sys.exit(130)
    except (ImportError, OSError, MemoryError) as error:
        said = ascii(" ".join(str(error).split())[:300])[1:-1] or type(error).__name__
        sys.exit(f"forebay: it cannot start: {said}; check the disk, the memory and what is installed (pip check)")
    run()
    raise AssertionError("click ends the process")


if __name__ == "__main__":
    main()
