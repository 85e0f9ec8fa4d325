"""Rows one by one through tiers: memory, an LMDB that processes share, the source. No build is needed ahead."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.tiers.cached_images import CachedImages
    from forebay.tiers.tier_value import TierStatistics, TierWarning
    from forebay.tiers.warming import clear_tier, summarize_tier, verify_tier, warm
# Where each public name lives; what needs lmdb is imported when it is first used.
_HOMES = {
    "CachedImages": "forebay.tiers.cached_images",
    **dict.fromkeys(("TierStatistics", "TierWarning"), "forebay.tiers.tier_value"),
    **dict.fromkeys(("clear_tier", "summarize_tier", "verify_tier"), "forebay.tiers.warming"),
    "warm": "forebay.tiers.warming",
}
__all__ = ["CachedImages", "TierStatistics", "TierWarning", "clear_tier", "summarize_tier", "verify_tier", "warm"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'forebay.tiers' has no attribute '{name}'", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return list(__all__)
