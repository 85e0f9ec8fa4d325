"""Where samples come from: files as they are, lines of files, documents of JSON lines."""

from forebay.sources.files import FileSource, files
from forebay.sources.jsonl import JsonlSource, jsonl
from forebay.sources.lines import LineSource, lines

__all__ = ["FileSource", "JsonlSource", "LineSource", "files", "jsonl", "lines"]
