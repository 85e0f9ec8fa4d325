"""`python -m forebay`: the command line of this very interpreter."""

from forebay.cli.__main__ import main

if __name__ == "__main__":
    main()
