"""Contracts that a new store, source, recipe or engine must pass, as tests to inherit; they need pytest.

class TestMyStore(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return MyStore(folder)
"""

from forebay.testing.engine_contract import EngineContract
from forebay.testing.kind_contracts import RecipeContract, SourceContract, check_hooks, read_in_parts
from forebay.testing.store_contract import SharedStoreContract, StoreContract

__all__ = [
    "EngineContract", "RecipeContract", "SharedStoreContract", "SourceContract", "StoreContract", "check_hooks",
    "read_in_parts",
]  # fmt: skip
