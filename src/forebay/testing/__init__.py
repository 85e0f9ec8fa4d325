"""Contracts that a new store or source must pass, as tests to inherit; they need pytest. And a fault campaign:
`python -m forebay.testing.campaign`.

class TestMyStore(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return MyStore(folder)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.testing.source_contract import SourceContract, read_in_parts
    from forebay.testing.store_contract import SharedStoreContract, StoreContract
# Where each name lives. A name is imported when it is first used: the campaign runs without pytest.
_HOMES = {
    **dict.fromkeys(("SourceContract", "read_in_parts"), "forebay.testing.source_contract"),
    **dict.fromkeys(("SharedStoreContract", "StoreContract"), "forebay.testing.store_contract"),
}
__all__ = ["SharedStoreContract", "SourceContract", "StoreContract", "read_in_parts"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forebay.testing' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
