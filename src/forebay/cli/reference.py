"""Generate docs/cli.md from the help texts: `python -m forebay.cli.reference > docs/cli.md`."""

from collections.abc import Iterator

import click

from forebay.cli.main import cli

REFRESH = "python -m forebay.cli.reference > docs/cli.md"
_HEAD = f"""# The command line

This page is the `--help` of every command; a test compares them. Update it with `{REFRESH}`.

`forebay VERB [CACHE]`. Results go to standard output, progress and errors to standard error. Every verb takes
`--json`; errors are still a line of text on standard error. Options marked `[recipe; 448]` define the cache (default
448): changing one requires a new cache.

| exit code | means |
|---|---|
| 0 | success |
| 1 | failure, or damage found; one line on standard error has the reason and the next step |
| 2 | wrong usage |
| 130 | stopped by Ctrl-C or SIGTERM; published chunks are safe, and the command to resume is printed |

## A settings file

```toml
[source]
paths = ["data/*.jsonl"]         # relative to this file
text = "text"

[recipe]
kind = "tokens"
tokenizer = "gpt2"               # every field of the recipe: see the options of its kind
sequence_length = 512

[build]
into = "caches/edu"
workers = 8
memory_limit = "16GB"
max_failures = "1%"
```

`forebay build settings.toml` builds it; flags override the file. An unknown key, a wrong type or a missing section is
an error that names the key, its line and the nearest valid name. The keys of the cache script that forebay replaces are
accepted and translated: [guide-tokens.md](guide-tokens.md#coming-from-the-old-cache-script).

## TAB completion

bash (4.4 or newer), zsh and fish complete verbs, kinds, options and their choices, caches and files. Add one line to
the start-up file of your shell:

```sh
eval "$(_FOREBAY_COMPLETE=bash_source forebay)"     # ~/.bashrc
eval "$(_FOREBAY_COMPLETE=zsh_source forebay)"      # ~/.zshrc, after compinit
_FOREBAY_COMPLETE=fish_source forebay | source      # ~/.config/fish/config.fish
```
"""


def reference() -> str:
    blocks = (f"\n## {name}\n\n```text\n{text}\n```\n" for name, text in helps())
    return _HEAD + "".join(blocks)


def helps() -> Iterator[tuple[str, str]]:
    """The full name and help of every command, in order."""
    yield from _helps(cli, click.Context(cli, info_name="forebay", **cli.context_settings))


def _helps(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, str]]:
    yield ctx.command_path, command.get_help(ctx)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            inner = command.commands[name]
            yield from _helps(inner, click.Context(inner, info_name=name, parent=ctx))


if __name__ == "__main__":
    click.echo(reference(), nl=False)
