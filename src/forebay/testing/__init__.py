"""Contracts that a new store or source must pass, as tests to inherit. They need pytest.

class TestMyStore(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return MyStore(folder)
"""

from forebay.testing.source import SourceContract, read_in_parts
from forebay.testing.store import SharedStoreContract, StoreContract

__all__ = ["SharedStoreContract", "SourceContract", "StoreContract", "read_in_parts"]
