"""Write docs/cli.md and docs/commands/ from the help texts: `python tools/cli_reference.py`."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from forebay.cli.main import SECTIONS, cli
from forebay.cli.options import GROUPS, Option
from forebay.cli.verb import HELP_ALL

DOCS = Path(__file__).parent.parent / "docs"
REFRESH = "python tools/cli_reference.py"
EVERYWHERE = {"--json", "--quiet", "--help-all", "--help"}  # options of every verb, which docs/cli.md explains

_HEAD = """# The command line

`forebay VERB [CACHE]`, or `python -m forebay VERB [CACHE]`. Results go to standard output, progress and errors to
standard error. `--help` shows the common options of a verb, `--help-all` the rest; the pages below list all. Every verb
also has `--json`, `-q` (`--quiet`: errors only) and `-h`.

"""
_REST = """
Exit codes: 0 success; 1 failure, or damage found: standard error has the reason and the next step; 2 wrong usage;
130 stopped by Ctrl-C or SIGTERM: published chunks are safe, and the command to resume is printed.

## JSON

`--json` prints exactly one document on standard output; [progress](#progress) goes to standard error:

```text
{"ok": true, "result": …}                                          exit 0
{"ok": false, "error": {"type": …, "message": …, …}}               it failed
{"ok": false, "result": …, "error": {"type": …, "message": …}}     it ran, and found a problem (verify, …)
```

`result` is the record that the Python function of the same name returns; `verify --align` and `build teachers` return a
list. Chunk numbers (`missing`, `lost`, `unlisted`, …) are ranges of first and last chunk: `[[0, 99], [120, 120]]`.
An error has a `type` (`CacheNotFound`, `UsageError`, `BuildStopped`, …), the `message`, and where known one `hint`, the
next `command` and `facts` such as `root`, `layer` or `path`. `demo` prints its steps on standard error.

## Progress

A terminal shows a bar. Elsewhere a line is printed after 2 seconds, then every 10 seconds in the first minute, every 30
seconds in the first ten minutes, and every minute after that. With `--json`, each is a JSON object on standard error,
in a terminal too: `{"progress": {"phase": "building", "done": 17, "total": 34, "tokens_per_second": …}}`.

## TAB completion

Add one line to the start-up file of bash (4.4 or newer), zsh or fish:

```sh
eval "$(_FOREBAY_COMPLETE=bash_source forebay)"     # ~/.bashrc; zsh_source in ~/.zshrc, after compinit
_FOREBAY_COMPLETE=fish_source forebay | source      # ~/.config/fish/config.fish
```
"""


def pages() -> dict[Path, str]:
    """The files of the reference and their text."""
    ctx = click.Context(cli, info_name="forebay", **cli.context_settings)
    texts = {DOCS / "cli.md": _HEAD + "\n".join(_verb_table(ctx)) + "\n" + _REST}
    for verb in cli.list_commands(ctx):
        texts[DOCS / "commands" / f"{verb}.md"] = "\n".join(_page(*_subcommand(cli, verb, ctx))).rstrip() + "\n"
    return texts


def helps() -> Iterator[tuple[str, str]]:
    """The full name and help of every command, in order."""
    yield from _helps(cli, click.Context(cli, info_name="forebay", **cli.context_settings))


def _helps(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, str]]:
    ctx.meta[HELP_ALL] = not ctx.command_path.startswith("forebay estimate")  # its options are those of build
    yield ctx.command_path, command.get_help(ctx)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            yield from _helps(*_subcommand(command, name, ctx))


def _subcommand(group: click.Group, name: str, ctx: click.Context) -> tuple[click.Command, click.Context]:
    command = group.get_command(ctx, name)
    assert command is not None
    return command, click.Context(command, info_name=name, parent=ctx)


def _verb_table(ctx: click.Context) -> Iterator[str]:
    yield "| Group | Verb | |"
    yield "|---|---|---|"
    for group, verbs in SECTIONS.items():
        for number, name in enumerate(verbs):
            command, _ = _subcommand(cli, name, ctx)
            heading = "" if number else group
            yield f"| {heading} | [`{name}`](commands/{name}.md) | {_markdown(command.get_short_help_str(200))} |"


def _page(command: click.Command, ctx: click.Context) -> Iterator[str]:
    """The page of a verb: its help, and those of its subcommands with one table of all their options."""
    yield f"# {ctx.command_path}"
    yield from _description(command, ctx)
    yield ""
    if not isinstance(command, click.Group):
        yield from _options({"": command}, ctx)
        return
    subcommands = {name: _subcommand(command, name, ctx) for name in command.list_commands(ctx)}
    described_elsewhere = _kinds_of_build(ctx) if ctx.info_name == "estimate" else {}
    for name, (subcommand, inner) in subcommands.items():
        if name not in described_elsewhere or name == "teachers":
            yield f"## {ctx.info_name} {name}"
            yield from _description(subcommand, inner)
            yield ""
    yield "## Options"
    yield ""
    if described_elsewhere:
        yield "Those of [`forebay build`](build.md) with the same kind, and:"
        yield ""
    yield from _options({name: subcommand for name, (subcommand, _) in subcommands.items()}, ctx, described_elsewhere)


def _description(command: click.Command, ctx: click.Context) -> Iterator[str]:
    """The help text as one paragraph, then usage and examples as code."""
    text, _, example = inspect.cleandoc(command.help or "").replace("\b", "").partition("Example:")
    yield ""
    yield _markdown(" ".join(text.split()))
    yield ""
    if ctx.parent is None or ctx.parent.parent is None:
        yield "    " + " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    yield from ("    " + line.strip() for line in example.strip().splitlines())


def _kinds_of_build(ctx: click.Context) -> dict[str, click.Command]:
    build, inner = _subcommand(cli, "build", ctx)
    assert isinstance(build, click.Group)
    return {name: _subcommand(build, name, inner)[0] for name in build.list_commands(inner)}


def _options(
    commands: dict[str, click.Command], ctx: click.Context, described: dict[str, click.Command] | None = None
) -> Iterator[str]:
    """One table of the options of several commands, where equal ones share a row; without those described elsewhere."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    elsewhere = {row for command in (described or {}).values() for row in _option_rows(command, ctx)}
    for name, command in commands.items():
        for row in _option_rows(command, ctx):
            if row not in elsewhere:
                rows.setdefault(row, []).append(name)
    if not rows:  # those of every verb are on docs/cli.md
        return
    yield "| Option | Of | Meaning |" if len(commands) > 1 else "| Option | Meaning |"
    yield "|---|---|---|" if len(commands) > 1 else "|---|---|"
    for group in GROUPS:
        for (of_group, flags, text), names in rows.items():
            if of_group == group:
                of = "all" if len(names) == len(commands) else ", ".join(names)
                yield f"| {flags} | {of} | {text} |" if len(commands) > 1 else f"| {flags} | {text} |"


def _option_rows(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, str, str]]:
    for param in command.params:
        record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
        if record is None or EVERYWHERE & set(param.opts):
            continue
        group = param.group if isinstance(param, Option) else "Options"
        flags, _, value = record[0].partition(" [")
        choices = f" {value.rstrip(']').replace('|', ', ')}" if value else ""
        flags = flags.replace("INTEGER RANGE", "N").replace("|", " or ")
        yield group, f"`{flags}`{choices}", _markdown(re.sub(r"\s*\[x>=\d+\]", "", " ".join(record[1].split())))


def _markdown(text: str) -> str:
    """Help as Markdown: what is special outside of code is escaped.

    >>> _markdown("a glob: 'data/*.jsonl', see `forebay tier`")
    "a glob: 'data/\\\\*.jsonl', see `forebay tier`"
    """
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<|])", r"\\\1", part) for part in parts)


if __name__ == "__main__":
    (DOCS / "commands").mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
