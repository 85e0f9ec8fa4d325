"""Contracts that a new store, source, recipe or engine must pass, as tests to inherit; they need pytest.
And a fault campaign: `python -m forebay.testing.campaign`.

class TestMyStore(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return MyStore(folder)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.testing.engine_contract import EngineContract
    from forebay.testing.recipe_contract import RecipeContract, check_hooks
    from forebay.testing.source_contract import SourceContract, read_in_parts
    from forebay.testing.store_contract import SharedStoreContract, StoreContract
# Where each name lives. A name is imported when it is first used: the campaign runs without pytest.
_HOMES = {
    "EngineContract": "forebay.testing.engine_contract",
    **dict.fromkeys(("RecipeContract", "check_hooks"), "forebay.testing.recipe_contract"),
    **dict.fromkeys(("SourceContract", "read_in_parts"), "forebay.testing.source_contract"),
    **dict.fromkeys(("SharedStoreContract", "StoreContract"), "forebay.testing.store_contract"),
}
__all__ = [
    "EngineContract", "RecipeContract", "SharedStoreContract", "SourceContract", "StoreContract", "check_hooks",
    "read_in_parts",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forebay.testing' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
