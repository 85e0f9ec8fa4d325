"""`forebay demo`: the whole thing on data every machine has."""

import os
import sysconfig
import tempfile

import click

from forebay.cli.options import json_option
from forebay.cli.rehearsal import Rehearsal
from forebay.cli.show import show

# Names of the standard library that begin with none of s, t and a capital: about 12 MB of Python, without the tests
# and site-packages.
NAMES = "[!stA-Z]*"


@click.command()
@click.option("--into", metavar="DIR", help="Work in this folder, new or empty.  [default: a temporary one]")
@click.option("--names", default=NAMES, hidden=True, help="Which names of the standard library to take.")
@click.option("--chunk-bytes", default="512KiB", hidden=True)
@json_option
def demo(into: str | None, names: str, chunk_bytes: str, as_json: bool) -> None:
    """Do a real job end to end on the text of the Python standard library.

    Estimate, build, interrupt, resume, verify, damage, repair, look: every command is printed as you would type it for
    data of your own. Exit code 1 when a step does not do what it should.

    Example: forebay demo --into demo
    """
    if into is not None and os.path.exists(into) and os.listdir(into):
        raise click.BadParameter(f"'{into}' is not empty; name a new folder", param_hint="'--into'")
    folder = into or tempfile.mkdtemp(prefix="forebay-demo-")
    library = os.path.join(sysconfig.get_path("stdlib"), names)
    source = ["raw", library, "--unit", "files", "--suffix", ".py", "--level", "max", "--chunk-bytes", chunk_bytes]
    show(Rehearsal(os.path.join(folder, "cache"), source, as_json).perform(), as_json)
