"""Where the command line begins: `forebay`, and `python -m forebay` for that of this very interpreter.

Importing the verbs reads hundreds of files. An error during that is printed as one line, too.
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
        message = ascii(" ".join(str(error).split())[:300])[1:-1] or type(error).__name__
        sys.exit(f"forebay: cannot start: {message}; check the disk, the memory and the installed packages (pip check)")
    run()
    raise AssertionError("click ends the process")


if __name__ == "__main__":
    main()
