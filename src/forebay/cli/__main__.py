"""`python -m forebay.cli`: the command line of this very interpreter."""

from forebay.cli.main import main

main()
