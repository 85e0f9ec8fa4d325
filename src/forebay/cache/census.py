"""Who the samples of a slice are: taken by the planner, and once more by whoever makes the chunk."""

import xxhash

from forebay.cache.plan import LeftOut
from forebay.errors import ForebayError, RecipeInvalid
from forebay.recipe import Identity
from forebay.source import Failure, Sample

IDENTITY_BYTES = 16


class Census:
    """Takes the identity of one sample after the other; `check` is one number for all of them in their order."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._running = xxhash.xxh3_64()

    def take(self, sample: Sample | Failure) -> bytes | None:
        """The identity of the next sample, None for one that is never left out."""
        found = None if isinstance(sample, Failure) else self._identify(sample)
        self._running.update(b"\0" if found is None else b"\1" + found)
        return found

    @property
    def check(self) -> int:
        value: int = self._running.intdigest()
        return value

    def _identify(self, sample: Sample) -> bytes | None:
        try:
            found = self._identity(sample)
        except (OSError, ForebayError):
            raise
        except Exception as error:  # a recipe may raise anything
            raise RecipeInvalid(f"the recipe cannot tell the identity of sample '{sample.id}': {error!r}") from error
        if found is not None and not (isinstance(found, bytes) and len(found) == IDENTITY_BYTES):
            raise RecipeInvalid(
                f"the recipe gave sample '{sample.id}' the identity {found!r:.80}; it must be {IDENTITY_BYTES} bytes, "
                f"or None"
            )
        return found


class Sieve:
    """Leaves out what the plan found to be duplicates, and sees to it that these are the samples it judged."""

    def __init__(self, identity: Identity, planned: LeftOut) -> None:
        self.left_out = len(planned.ordinals)
        self._ordinals = frozenset(planned.ordinals.tolist())
        self._check = planned.check
        self._census = Census(identity)
        self._seen = 0

    def keeps(self, sample: Sample | Failure) -> bool:
        """Whether the next sample of the slice is given to the recipe."""
        self._census.take(sample)
        self._seen += 1
        return self._seen - 1 not in self._ordinals

    def saw_what_was_planned(self) -> bool:
        return self._census.check == self._check
