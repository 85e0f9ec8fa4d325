"""Options and arguments that several verbs share."""

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from forebay.cli.sizes import AllowedType, SizeType

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For TAB: the shell itself lists what is there."""
    return [CompletionItem(incomplete, type="file")]


def complete_folder(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


cache_argument: Decorator = click.argument("cache", shell_complete=complete_folder)
json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print the record as JSON on standard output, and no progress."
)
source_option: Decorator = click.option(
    "--check-source", is_flag=True, help="Contact a remote source or model that the cache names."
)
workers_option: Decorator = click.option(
    "--workers", type=click.IntRange(min=0), help="Worker processes; 0 works in this one. [default: one per core]"
)
memory_option: Decorator = click.option(
    "--memory-limit", type=SizeType(), help="Most memory that builder and workers may hold, like 16GB."
)
failures_option: Decorator = click.option(
    "--max-failures",
    type=AllowedType(),
    help="Fail when more samples fail than a count (20) or a share (1%); 100% allows all. [default: stop at a chunk of "
    "which all samples fail]",
)


skip_option: Decorator = click.option(
    "--skip-unreadable", is_flag=True, default=None, help="Leave out damaged files of the source, and list them."
)


def decorated(command: Command, *decorators: Decorator) -> Command:
    """A command with options in the order in which help shows them."""
    for decorator in reversed(decorators):
        command = decorator(command)
    return command
