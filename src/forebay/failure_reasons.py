"""Counts of failure reasons, with a hint for the most frequent one."""

from collections import Counter
from collections.abc import Iterable

from forebay.source import Failure

_MOST_CHARS = 300
_ADVICE = {
    "no-text": "pass the name of the text field (text=…, --text …)",
    "not-text": "pass another text field (text=…, --text …)",
    "null": "pass another text field (text=…, --text …)",
    "no-messages": "pass the field with the messages (names={'messages': …}, --names messages=…)",
    "bad-json": "check that the files are JSON lines, one object in each line",
    "not-utf8": "convert the files to UTF-8, or read them as what they are",
    **dict.fromkeys(
        ("template", "contents-changed", "not-a-prefix"),
        "pass a template that fits these messages (template=…, --template FILE)",
    ),
    "thinking-lost": "pass a template that writes it (--template FILE), or drop it (thinking='drop', --thinking drop)",
    "outside-root": "pass the folder that the paths are relative to (root=…, --root …)",
}


class Reasons:
    """Why samples failed: how often each reason, and the first sample of each."""

    def __init__(self, failures: Iterable[Failure] = ()) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, Failure] = {}
        for failure in failures:
            self.add(failure)

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, failure: Failure) -> None:
        self._counts[failure.reason] += 1
        self._examples.setdefault(failure.reason, failure)

    def most_frequent(self) -> tuple[str, int, str]:
        """The reason that most failures have, how many, and the first sample of them in words."""
        reason, count = self._counts.most_common(1)[0]
        return reason, count, _words(self._examples[reason])

    def advice(self) -> str:
        """A hint for the most frequent reason."""
        reason, _, _ = self.most_frequent()
        example = self._examples[reason]
        if reason == "bad-json" and "`array`" in example.detail:
            return "it looks like one JSON array, not JSON lines: write one object in each line"
        if reason == "not-found" and example.detail.startswith("line "):
            return _ADVICE["outside-root"]
        return _ADVICE.get(reason, "check that the samples are what the recipe reads")


def _words(example: Failure) -> str:
    words = f"'{example.sample}': {example.detail}" if example.detail else f"'{example.sample}'"
    return words if len(words) <= _MOST_CHARS else f"{words[:_MOST_CHARS]}…"
