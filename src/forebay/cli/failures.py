"""An exception as a message, one hint, an exit code, and facts for programs."""

import errno
import re
import traceback
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import click
import msgspec

from forebay.cli.options import WrongUsage
from forebay.cli.output import error_document, say, say_error
from forebay.cli.verb import Verbs, meant_option
from forebay.errors import BuildStopped, ForebayError
from forebay.preview.words import harmless

FAILURE, USAGE, STOPPED = 1, 2, 130
REPORT = "this is a bug in forebay: report the lines above, the command and the output of `forebay doctor`"
OF_EVERY_VERB = ("--json", "-q", "--quiet", "--help-all")
_COMMAND = re.compile(r"`(forebay [^`…]*)`")


class CommandFailure(click.ClickException):
    """The failure of a command."""

    def __init__(self, message: str, kind: str, code: int = FAILURE, *, hint: str = "", **others: Any) -> None:
        super().__init__(_on_one_line(message))
        vars(self)["exit_code"] = code  # declared a class variable, but click reads it from the instance
        self.kind, self.hint, self.command = kind, _on_one_line(hint), str(others.get("command", ""))
        self.facts: Mapping[str, Any] = others.get("facts", {})

    def document(self) -> dict[str, Any]:
        return error_document(self.kind, self.message, self.hint, self.command, self.facts)

    def show(self, file: Any = None) -> None:
        say_error(self.message, self.hint)


def _on_one_line(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines())


def failure_of(error: BaseException, typed: str) -> CommandFailure:
    """The failure that an exception means; `typed` is the command as the user typed it."""
    if isinstance(error, KeyboardInterrupt):
        return _stopped(error, typed)
    kind = type(error).__name__
    if isinstance(error, ForebayError):
        command = _COMMAND.search(str(error))
        facts = {name: value for name, value in error.facts.items() if _is_plain(value)}
        return CommandFailure(error.message, kind, hint=error.hint, command=command[1] if command else "", facts=facts)
    if isinstance(error, OSError):
        message, hint = _of_system(error)
        facts = {"path": error.filename} if isinstance(error.filename, str) else {}
        return CommandFailure(message, kind, hint=hint, facts=facts)
    message, hint = _known_cause(error) or ("", "")
    if not message:
        say(traceback.format_exc().rstrip())
        message, hint = f"{kind}: {error}", REPORT
    return CommandFailure(message, kind, hint=hint)


def usage_failure(error: click.ClickException) -> CommandFailure:
    """Wrong usage, with the option that was probably meant or the command that shows the help."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    command = f"{ctx.command_path if ctx is not None else 'forebay'} --help"
    text, hint = error.format_message(), ""
    message = text[:1].lower() + text[1:]  # as in all our errors
    if isinstance(error, click.NoSuchOption):
        message, hint = _unknown_option(error)
    elif isinstance(error, WrongUsage):
        message, hint = error.message, error.hint
    elif isinstance(error, click.BadParameter):
        message, _, hint = message.partition("; ")
    return CommandFailure(
        harmless(message).rstrip("."), "UsageError", USAGE, hint=harmless(hint) or f"see `{command}`", command=command
    )


def _unknown_option(error: click.NoSuchOption) -> tuple[str, str]:
    name, ctx = error.option_name, error.ctx
    if ctx is None:
        return f"no option '{name}'", ""
    if isinstance(ctx.command, Verbs) and name in OF_EVERY_VERB:
        inner = "status CACHE" if ctx.parent is None else f"{next(iter(ctx.command.list_commands(ctx)))} …"
        return f"'{name}' comes after the verb and its arguments", f"for instance: {ctx.command_path} {inner} {name}"
    near = meant_option(name, _options_of(ctx.command))
    hint = f"did you mean '{near}'?" if near.startswith("--") else near
    return f"`{ctx.command_path}` has no option '{name}'", hint


def _options_of(command: click.Command) -> Iterable[str]:
    shown = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    return [name for one in shown for name in (*one.opts, *one.secondary_opts)]


def _is_plain(value: Any) -> bool:
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _stopped(stop: KeyboardInterrupt, typed: str) -> CommandFailure:
    if not isinstance(stop, BuildStopped):
        return CommandFailure("stopped", "Interrupted", STOPPED, hint=f"start again with: {typed}", command=typed)
    layers = import_module("forebay.api").status(stop.root, depth="index").layers
    counts = ", ".join(f"{layer.layer} {layer.listed:,} of {layer.planned:,}" for layer in layers)
    message = f"stopped: all finished chunks of '{stop.root}' are published ({counts})"
    facts = {"root": stop.root}
    return CommandFailure(message, "BuildStopped", STOPPED, hint=f"resume with: {typed}", command=typed, facts=facts)


def _known_cause(error: BaseException) -> tuple[str, str] | None:
    """The message and hint for an error of memory, a library, or deeply nested data."""
    message = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError):
        return f"not enough memory{f' ({message})' if message else ''}", "use fewer --workers or smaller chunks"
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):  # torch's, which is not imported here
        return f"the device does not have enough memory: {message}", "use a smaller --batch-size or another --device"
    if isinstance(error, RecursionError):
        return f"the data is nested too deeply ({message})", "check the source or the cache"
    if isinstance(error, ImportError) and not (error.name or "").startswith("forebay"):
        return f"a library is missing, damaged or too old: {message}", "see what is installed with `forebay doctor`"
    return None


def _of_system(error: OSError) -> tuple[str, str]:
    where = f"'{error.filename}': " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}the disk is full", "free some space and run the same command again"
    if error.errno == errno.EROFS:
        return f"{where}{error.strerror}", "mount it for writing, or choose another folder"
    if error.errno == errno.ENOTDIR:
        return f"{where}{error.strerror}", "choose a folder"
    return f"{where}{error.strerror or error}", "check the path, its permissions and the disk"
