"""Where samples come from: files as they are, lines of files."""

from forebay.sources.files import FileSource, files
from forebay.sources.lines import LineSource, lines

__all__ = ["FileSource", "LineSource", "files", "lines"]
