"""The one teacher that this process has loaded. Loading another lets it go first: peak memory is one model."""

import gc
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from forebay.columns import Array
from forebay.teachers.memo import Memo
from forebay.teachers.protocol import Batch, Loaded, Teacher


@dataclass(slots=True, eq=False)
class Seated:
    """A loaded teacher, and what happened since."""

    name: str
    device: str
    loaded: Loaded
    memo: Memo
    forwards: int = 0
    prompts: int = 0
    computed: int = 0
    seats_agree: bool | None = None  # unknown until it was tried
    asked_as: Hashable = None

    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        self.forwards += 1
        return self.loaded(batch)

    def begin(self, asked_as: Hashable) -> None:
        """What was remembered of prompts that were asked, or are stored, in another way is of no use."""
        if self.asked_as != asked_as:
            self.memo.clear()
            self.asked_as, self.seats_agree = asked_as, None

    def notes(self) -> tuple[str, ...]:
        where = "" if self.device == "auto" else f" onto {self.device}"
        lines = [f"'{self.name}' was loaded{where} and ran {self.forwards:,} forward batch(es)"]
        if self.prompts:
            apart = "" if self.seats_agree is not False else "; its kernels tell seats of a batch apart, none is reused"
            lines.append(
                f"{self.prompts:,} prompt(s) were asked for and {self.computed:,} computed, {self.memo.hits:,} were "
                f"remembered from earlier chunks{apart}"
            )
        return tuple(lines)


@dataclass(slots=True)
class _Slot:
    key: Hashable = None
    seated: Seated | None = None


_slot = _Slot()


def seat(teacher: Teacher, device: str, dtype: str, memo_bytes: int) -> Seated:
    """The teacher, loaded now unless it is the one that is."""
    key = (teacher, device, dtype, tuple(sorted(teacher.files().items())))
    if _slot.seated is None or _slot.key != key:
        unload()
        _slot.seated = Seated(teacher.tag(), device, teacher.load(device, dtype), Memo(memo_bytes))
        _slot.key = key
    return _slot.seated


def unload() -> tuple[str, ...]:
    """Let the loaded teacher go, and say what it did; nothing where there is none."""
    seated, _slot.seated, _slot.key = _slot.seated, None, None
    if seated is None:
        return ()
    notes = seated.notes()
    close = getattr(seated.loaded, "close", None)
    if close is not None:
        close()
    del seated, close
    gc.collect()  # modules hold themselves in cycles
    return notes
