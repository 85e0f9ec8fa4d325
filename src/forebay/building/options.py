"""How to run a build: workers, limits, engine. Nothing of it changes a byte."""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from forebay.cache.heartbeat import LEASE_BOUNDS, LEASE_SECONDS
from forebay.cache.reports import OnProgress, Progress
from forebay.engine import InlineEngine, LocalEngine
from forebay.engine.base import Engine
from forebay.errors import LibraryMissing
from forebay.fields import checked_failures, checked_number, checked_whole
from forebay.recipe import AnyRecipe, hooks_of
from forebay.source import Source

ENGINES = ("inline", "local", "ray")


def silent(progress: Progress) -> None:
    """Show nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The arguments that `build`, `update` and `repair` share, validated once."""

    workers: int | None = None  # 0: in this process; None: as many as the recipe asks for, or one per core
    memory_limit: int | None = None
    max_failures: int | float | None = None  # per segment: a count, or a share up to 1; None: 1% or 10 if more
    lease_seconds: float = LEASE_SECONDS
    engine: "str | Engine | None" = None  # a name of ENGINES, an engine, None: by `workers`
    on_progress: OnProgress = silent

    def __post_init__(self) -> None:
        checked = {
            "workers": None if self.workers is None else checked_whole("workers", self.workers),
            "memory_limit": None if self.memory_limit is None else checked_whole("memory_limit", self.memory_limit, 1),
            "max_failures": None if self.max_failures is None else checked_failures(self.max_failures),
            "lease_seconds": checked_number("lease_seconds", self.lease_seconds, *LEASE_BOUNDS),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.engine, Engine) and self.engine not in (None, *ENGINES):
            raise ValueError(f"engine must be {', '.join(map(repr, ENGINES))} or an Engine (got {self.engine!r})")

    def suited_to(self, recipe: AnyRecipe, source: Source | None = None) -> "BuildOptions":
        """The options with the number of workers from the recipe or source, unless the caller chose one."""
        if self.engine not in (None, "local") or self.workers is not None:
            return self
        wanted = hooks_of(recipe).workers
        if wanted is None and source is not None and self.memory_limit is None:
            wanted = source.workers()
        return replace(self, workers=wanted)

    def open_engine(self) -> Engine:
        """The engine that makes chunks: the caller's own, or one by name."""
        engine = self.engine if isinstance(self.engine, Engine) else self._named_engine(self.engine or "local")
        usage = engine.usage()
        if usage.elsewhere and self.memory_limit is not None:
            raise ValueError("memory_limit bounds processes of this machine; leave it out with workers elsewhere")
        if usage.elsewhere and self.workers == 0:
            raise ValueError("workers must be at least 1 with workers elsewhere (got 0); leave it out to use them all")
        if usage.in_process and isinstance(self.workers, int) and self.workers > 1:
            raise ValueError(f"workers must be 0 or 1 with engine='inline', which has one (got {self.workers})")
        return engine

    def _named_engine(self, name: str) -> Engine:
        if name == "ray":
            return ray_engine()
        return InlineEngine() if name == "inline" or self.workers == 0 else LocalEngine()

    def slots(self, engine: Engine) -> int:
        """How many chunks are made at once."""
        return engine.capacity() if self.workers is None else max(1, self.workers)


def ray_engine(**options: Any) -> Engine:
    """A `RayEngine`; the library is imported only now."""
    try:
        module = import_module("forebay.engine.ray")
    except ModuleNotFoundError as error:
        raise LibraryMissing(
            "engine='ray' needs 'ray', which is not installed", hint="pip install 'forebay[ray]'", extra="ray"
        ) from error
    engine: Engine = module.RayEngine(**options)
    return engine
