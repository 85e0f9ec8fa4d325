"""`forebay demo`: the whole thing on data every machine has."""

import os
import shutil
import tempfile

import click
import msgspec

from forebay.cli.demo_data import write_library
from forebay.cli.options import complete_folder, json_option
from forebay.cli.rehearsal import Rehearsal
from forebay.cli.show import show

# Modules and packages from `abc` to `html`: some 5 MB of Python on every machine, without site-packages.
NAMES = "[a-h]*"


@click.command()
@click.option(
    "--into",
    metavar="DIR",
    shell_complete=complete_folder,
    help="Work in this folder, new or empty.  [default: a temporary one]",
)
@click.option("--keep", is_flag=True, help="Leave the temporary folder; the cache's place is printed.")
@click.option("--names", default=NAMES, hidden=True, help="Which names of the standard library to take.")
@click.option("--chunk-size", default=150, hidden=True)
@json_option
def demo(into: str | None, keep: bool, names: str, chunk_size: int, as_json: bool) -> None:
    """Do a real job end to end: Python's standard library as packed tokens.

    Estimate, build, interrupt, resume, verify, damage, repair, look: every command is printed as you would type it for
    data of your own. Exit code 1 when a step does not do what it should; what was made is left there then.

    Example: forebay demo --into demo
    """
    if into is not None and os.path.exists(into) and os.listdir(into):
        raise click.BadParameter(f"'{into}' is not empty; name a new folder", param_hint="'--into'")
    folder = into or tempfile.mkdtemp(prefix="forebay-demo-")
    library = write_library(os.path.join(folder, "library.jsonl"), names)
    source = ["tokens", library, "--chunk-size", str(chunk_size), "--level", "max", "--deduplicate"]
    report = Rehearsal(os.path.join(folder, "cache"), source, as_json).perform()
    if into is None and not keep:
        shutil.rmtree(folder)
        report = msgspec.structs.replace(report, kept=False)
    show(report, as_json)
