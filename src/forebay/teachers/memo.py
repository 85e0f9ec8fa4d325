"""What was computed for an input, remembered for equal ones: least recently used go first, bounded by bytes."""

from collections import OrderedDict
from collections.abc import Mapping

from forebay.columns import Array


class Memo:
    """Arrays by the input they were made of."""

    def __init__(self, limit_bytes: int) -> None:
        self.hits = 0
        self.bytes = 0
        self._limit = limit_bytes
        self._known: OrderedDict[str, Mapping[str, Array]] = OrderedDict()

    def get(self, key: str) -> Mapping[str, Array] | None:
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
            self.hits += 1
        return found

    def clear(self) -> None:
        self._known.clear()
        self.bytes = 0

    def put(self, key: str, arrays: Mapping[str, Array]) -> None:
        size = _size(arrays)
        if size > self._limit or key in self._known:
            return
        self._known[key] = arrays
        self.bytes += size
        while self.bytes > self._limit:
            _, oldest = self._known.popitem(last=False)
            self.bytes -= _size(oldest)


def _size(arrays: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in arrays.values())
