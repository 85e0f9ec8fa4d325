"""Errors as a line, as JSON and as an exit code."""

import errno
import re
import traceback
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import click
import msgspec

from forebay.cli.show import error_document, say, say_error
from forebay.errors import BuildStopped, ForebayError
from forebay.preview.words import harmless

FAILURE, USAGE, STOPPED = 1, 2, 130
NOTHING: Mapping[str, Any] = MappingProxyType({})
REPORT = "this is a bug in forebay; please report it with the lines above"
_COMMAND = re.compile(r"`(forebay [^`…]*)`")


class CommandFailure(click.ClickException):
    """The end of a command that could not do what it should."""

    def __init__(
        self, message: str, kind: str, code: int = FAILURE, command: str = "", details: Mapping[str, Any] = NOTHING
    ) -> None:
        super().__init__(message)
        vars(self)["exit_code"] = code  # declared a class variable, but click reads it from the instance
        self.kind, self.command, self.details = kind, command, details

    def document(self) -> dict[str, Any]:
        return error_document(self.kind, self.message, self.command, self.details)

    def show(self, file: Any = None) -> None:
        say_error(self.message)
        if self.exit_code == STOPPED:
            say(f"  {self.command}")


def failure_of(error: BaseException, typed: str) -> CommandFailure:
    """The failure that an exception means; `typed` is the command as the user typed it."""
    if isinstance(error, KeyboardInterrupt):
        return _stopped(error, typed)
    kind, message = type(error).__name__, str(error)
    if isinstance(error, ForebayError):
        found = _COMMAND.search(message)
        return CommandFailure(message, kind, command=found[1] if found else "", details=_details(error))
    if isinstance(error, OSError):
        details = {"path": error.filename} if isinstance(error.filename, str) else {}
        return CommandFailure(_message_of(error), kind, details=details)
    known = _known_cause(error)
    if known is None:
        say(traceback.format_exc().rstrip())
    return CommandFailure(known or REPORT, kind)


def usage_document(error: click.ClickException) -> dict[str, Any]:
    """Wrong usage in JSON, with the command that shows the help."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    path = ctx.command_path if ctx is not None else "forebay"
    return error_document("UsageError", harmless(error.format_message()), f"{path} --help")


def _details(error: ForebayError) -> dict[str, Any]:
    """The attributes of an error that can be written as JSON."""
    found: Mapping[str, Any] = vars(error)
    return {name: value for name, value in found.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _stopped(stop: KeyboardInterrupt, typed: str) -> CommandFailure:
    if not isinstance(stop, BuildStopped):
        return CommandFailure(
            "stopped before the end; nothing is lost, run again with:", "Interrupted", STOPPED, command=typed
        )
    found = import_module("forebay.api").gaps(stop.root)
    counts = ", ".join(f"{gaps.layer} {gaps.present:,} of {gaps.planned:,}" for gaps in found)
    message = f"stopped: all finished chunks of '{stop.root}' are published ({counts}); resume with:"
    return CommandFailure(message, "BuildStopped", STOPPED, command=typed, details={"root": stop.root})


def _known_cause(error: BaseException) -> str | None:
    """The message for an error that is not a bug of forebay: memory, a library, data that is nested too deeply."""
    message = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError):
        return (
            f"not enough memory{f' ({message})' if message else ''}; use fewer --workers, smaller chunks, or a machine "
            "with more memory"
        )
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):  # torch's, which is not imported here
        return f"the device does not have enough memory: {message}; use a smaller --batch-size or another --device"
    if isinstance(error, RecursionError):
        return f"the data is nested too deeply ({message}); check the file or the cache that was named"
    if isinstance(error, ImportError) and not (error.name or "").startswith("forebay"):
        return f"a library is missing, damaged or too old: {message}; see what is installed with `forebay doctor`"
    return None


def _message_of(error: OSError) -> str:
    where = f"'{error.filename}': " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}the disk is full; published chunks stay valid: free some space and run the same command again"
    if error.errno == errno.EROFS:
        return f"{where}{error.strerror}; mount it for writing, or name another folder"
    return f"{where}{error.strerror or error}; check the path, its permissions and the disk"
