"""A hub for a test, and the client's connections closed behind it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from tests.hub.server import HubServer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub of its own that nothing but the test knows; what is kept of it is kept in the test's folder."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setenv("HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.utils.close_session()  # the next one is opened with this environment
    threads = set(threading.enumerate())
    with HubServer() as server:
        yield server
        huggingface_hub.utils.close_session()
    assert set(threading.enumerate()) <= threads
