"""How reading goes in this process; added to under one lock, as threads may read at once."""

import threading
from collections import Counter
from collections.abc import Sequence


class Counts:
    def __init__(self, news: Sequence[str] = ()) -> None:
        self.l1_hits = self.l2_hits = self.misses = 0
        self.l2_read_bytes = self.made_bytes = self.compared = 0
        self.bad: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._news = list(news)
        self._lock = threading.Lock()

    def add(
        self,
        *,
        l1_hits: int = 0,
        l2_hits: int = 0,
        misses: int = 0,
        l2_read_bytes: int = 0,
        made_bytes: int = 0,
        compared: int = 0,
    ) -> None:
        with self._lock:
            self.l1_hits += l1_hits
            self.l2_hits += l2_hits
            self.misses += misses
            self.l2_read_bytes += l2_read_bytes
            self.made_bytes += made_bytes
            self.compared += compared

    def count_bad(self, reason: str, words: str) -> None:
        """A value that was not served; the words of the first of each reason are news."""
        with self._lock:
            self.bad[reason] += 1
            if self.bad[reason] == 1:
                self._news.append(words)

    def count_failure(self, reason: str) -> None:
        with self._lock:
            self.failures[reason] += 1

    def news(self) -> list[str]:
        """What was not reported yet."""
        if not self._news:
            return []
        with self._lock:
            news, self._news = self._news, []
            return news
