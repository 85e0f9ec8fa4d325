"""Generate docs/cli.md from the help texts: `python tools/cli_reference.py > docs/cli.md`."""

from collections.abc import Iterator

import click

from forebay.cli.main import cli
from forebay.cli.verb import HELP_ALL

REFRESH = "python tools/cli_reference.py > docs/cli.md"
_HEAD = f"""# The command line

This page is the `--help` of every command; a test compares them. Update it with `{REFRESH}`.

`forebay VERB [CACHE]`, or `python -m forebay VERB [CACHE]`. Results go to standard output, progress and errors to
standard error. 

This page shows all options: `--help-all`. `--help` leaves out rare ones.

| exit code | means |
|---|---|
| 0 | success |
| 1 | failure, or damage found; one line on standard error has the reason and the next step |
| 2 | wrong usage |
| 130 | stopped by Ctrl-C or SIGTERM; published chunks are safe, and the command to resume is printed |

## JSON

`--json` prints exactly one document on standard output, whatever happens, and no progress:

```text
{{"ok": true, "result": …}}                                          exit 0
{{"ok": false, "error": {{"type": …, "message": …, …}}}}               it failed
{{"ok": false, "result": …, "error": {{"type": …, "message": …}}}}     it ran, and found a problem (verify, …)
```

`ok` is true exactly if the exit code is 0. `result` is the record that the function of the same name returns in Python;
`verify --align` and `build teachers` return a list. Numbers of chunks (`missing`, `lost`, `unlisted`, …) are ranges,
each with its first and last chunk: `[[0, 99], [120, 120]]`; in Python they are tuples of numbers. An error has its
`type` (`CacheNotFound`, `UsageError`, `BuildStopped`, …), the `message` that is also on standard error, and, where
known, one `hint`, the next `command` to type and `facts` such as `root`, `layer` or `path`. `demo` prints
its steps on standard error.

## Progress

A terminal shows a bar and a line of figures, cut to its width. Elsewhere a line is printed after 2 seconds, then every
10 seconds in the first minute, every 30 seconds in the first ten minutes, and every minute after that. `-q` prints
errors only: no progress, no notes, and no result as text; the exit code answers.

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
an error that names the key, its line and the nearest valid name.

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
    ctx.meta[HELP_ALL] = not ctx.command_path.startswith("forebay estimate")  # its options are those of build
    yield ctx.command_path, command.get_help(ctx)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from _helps(inner, click.Context(inner, info_name=name, parent=ctx))


if __name__ == "__main__":
    click.echo(reference(), nl=False)
