"""The fault campaign, from a clone of the project: `python -m forebay.testing.campaign --seed 7 --minutes 2`.

It is `tests/campaign`, which is not part of the wheel.
"""

import runpy
import sys
from importlib.util import find_spec


def main() -> None:
    if find_spec("tests") is None or find_spec("tests.campaign") is None:
        sys.exit("the fault campaign is in the source tree: run this in a clone of forebay, or `make campaign` there")
    runpy.run_module("tests.campaign", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
