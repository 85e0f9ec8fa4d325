"""Where samples come from: files as they are, lines of files, documents of text files and of JSON lines."""

from forebay.sources.files import FileSource, files
from forebay.sources.jsonl import JsonlSource, jsonl
from forebay.sources.lines import LineSource, lines
from forebay.sources.text import TextSource, text

__all__ = ["FileSource", "JsonlSource", "LineSource", "TextSource", "files", "jsonl", "lines", "text"]
