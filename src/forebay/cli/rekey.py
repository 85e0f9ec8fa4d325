"""`forebay rekey`: add a key to a cache, or change it."""

import os

import click

from forebay import api
from forebay.cli.options import cache_argument, json_option
from forebay.cli.progress import shown_progress
from forebay.cli.show import show
from forebay.format.key import VARIABLE


@click.command()
@cache_argument
@click.option("--old-key-env", metavar="NAME", help="Environment variable with the key that the cache has now.")
@click.option(
    "--old-key-file", type=click.Path(exists=True, dir_okay=False), help="File with the key that the cache has now."
)
@click.option("--new-key-env", metavar="NAME", help=f"Environment variable with the new key. [default: {VARIABLE}]")
@json_option
def rekey(
    cache: str, old_key_env: str | None, old_key_file: str | None, new_key_env: str | None, as_json: bool
) -> None:
    """Add a key to a cache, or replace its key by another.

    Checks every byte first, then signs each generation under its number with the new key. Without an old key the cache
    must carry no tag: adding a key trusts what is there now. An older generation that lists a lost or damaged file is
    removed. Stop builds of the cache first; chunks stay as they are. A key is never an argument: others could see it.

    \b
    Example: forebay rekey caches/edu
             forebay rekey caches/edu --old-key-env OLD_KEY
    """
    if old_key_env and old_key_file:
        raise click.UsageError("--old-key-env and --old-key-file both name the old key; use one of them.")
    old = _from_environment(old_key_env, "--old-key-env") if old_key_env else None
    old = _from_file(old_key_file) if old_key_file else old
    new = _from_environment(new_key_env or VARIABLE, "--new-key-env")
    with shown_progress(as_json) as on_progress:
        report = api.rekey(cache, old_key=old, new_key=new, on_progress=on_progress)
    show(report, as_json)


def _from_environment(name: str, option: str) -> bytes:
    value = os.fsencode(os.environ.get(name, ""))
    if not value:
        raise click.UsageError(
            f"the environment variable '{name}' is not set or empty; set it, or name one by {option}."
        )
    return value


def _from_file(path: str) -> bytes:
    """The content of a file, but for one line end at its end."""
    with open(path, "rb") as file:
        value = file.read().removesuffix(b"\n").removesuffix(b"\r")
    if not value:
        raise click.UsageError(f"'{path}' is empty; it should hold the old key.")
    return value
