"""`forebay VERB KIND SOURCE…`, `forebay VERB settings.toml` and `forebay VERB CACHE`: which of them was typed."""

import os
from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from forebay.cli.kinds import KINDS
from forebay.cli.options import Decorator
from forebay.cli.settings import Settings, from_cache, from_file, from_words, kept_recipe
from forebay.cli.settings_file import checked_kind, closest, read_settings_file
from forebay.cli.words import command_line
from forebay.format import layout

# How a group tells the subcommand of a kind where the settings are.
FROM_OPTIONS: tuple[Decorator, ...] = (
    click.option("--from-file", hidden=True),
    click.option("--from-cache", hidden=True),
)


class KindGroup(click.Group):
    """Has one subcommand per kind; a settings file or a cache stands for the kind that it names."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """A settings file or a cache, where no kind begins like what was typed."""
        return [CompletionItem(incomplete, type="file"), *super().shell_complete(ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word in self.commands or word.startswith("-"):
            return super().resolve_command(ctx, args)
        if ctx.resilient_parsing:
            return (
                None,
                None,
                args,
            )  # a shell asks what could come next; a settings file or a cache is not opened for it
        if is_settings_file(word):
            kind = checked_kind(read_settings_file(word), KINDS)
            return kind, self.commands[kind], ["--from-file", *args]
        if is_cache(word):
            kind = kept_recipe(word, _layer_among(args)).kind
            return kind, self.commands[kind], ["--from-cache", *args]
        raise click.UsageError(
            f"'{word}' is not a kind of data, a settings file or a cache; {self._hint(ctx, args)}", ctx
        )

    def _hint(self, ctx: click.Context, args: list[str]) -> str:
        """What was meant: a kind with a slip in it, or a source without its kind."""
        meant = closest(args[0], list(self.commands))
        kinds = ", ".join(KINDS)
        if meant is None:
            example = command_line(str(ctx.info_name), next(iter(self.commands)), *args)
            return f"a source comes after its kind ({kinds}), as in: {example}"
        return f"did you mean: {command_line(str(ctx.info_name), meant, *args[1:])}"


def is_settings_file(word: str) -> bool:
    return word.endswith(".toml")


def is_cache(word: str) -> bool:
    return os.path.exists(os.path.join(word, layout.CACHE))


def gathered(kind: str, file: str | None, cache: str | None, flags: Mapping[str, Any]) -> Settings:
    """Settings from wherever the user keeps them, under the flags that were passed."""
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    if file is not None:
        return from_file(file, given)
    if cache is not None:
        return from_cache(cache, given)
    return from_words(KINDS[kind], given)


def _layer_among(args: list[str]) -> str | None:
    """The layer that is asked for: its recipe decides which options there are."""
    for position, word in enumerate(args[1:], 1):
        if word == "--layer" and position + 1 < len(args):
            return args[position + 1]
        if word.startswith("--layer="):
            return word.partition("=")[2]
    return None
