"""Chunks of 64 and of 300 MiB, sent in parts by a builder that is killed in the middle. Minutes, so `-m long`."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.builders import script_environment, wait_until
from tests.cli.running import run
from tests.remote.test_parts import SERVICES, service  # noqa: F401, a fixture
from tests.remote.wide_layer import KEY, build

from forebay.store import open_store
from forebay.store.bucket_client import ASIDE, PART_BYTES
from forebay.testing.faults import Fault, FaultProxy

pytestmark = pytest.mark.long
MEBIBYTES = [64, 300]
OTHER_MEMORY = 160 << 20  # the interpreter, its libraries, and the parts that are under way
ENDPOINTS = {"gs": "GOOGLE_SERVICE_ACCOUNT", "az": "AZURITE_BLOB_STORAGE_URL"}


def started(url: str, mebibytes: int, **settings: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "tests.remote.wide_layer", url, str(mebibytes)]
    return subprocess.Popen(words, env=script_environment() | settings, stdout=subprocess.PIPE, text=True)


def behind(proxy: FaultProxy, name: str, folder: Path) -> dict[str, str]:
    """The environment of a process that reaches a service through a proxy."""
    variable = ENDPOINTS.get(name, "AWS_ENDPOINT_URL")
    if name != "gs":
        return {variable: proxy.url}
    account = json.loads(Path(os.environ[variable]).read_text()) | {"gcs_base_url": proxy.url}
    (folder / "behind.json").write_text(json.dumps(account))
    return {variable: str(folder / "behind.json")}


@pytest.fixture(scope="module", params=MEBIBYTES)
def local(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    """(mebibytes, SHA-256 of the chunk of a local build)."""
    root = tmp_path_factory.mktemp("local") / str(request.param)
    assert build(str(root), request.param) == 1
    return request.param, hashlib.sha256((root / KEY).read_bytes()).hexdigest()


def aside(store: Any) -> list[str]:
    return [entry.key for entry in store.walk(ASIDE)]


def test_a_killed_builder_of_a_large_chunk_loses_nothing(
    local: tuple[int, str],
    service: tuple[str, str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    mebibytes, sha256 = local
    bucket, endpoint, name = service
    url = f"{bucket}/cache"
    store = open_store(url)
    with FaultProxy(endpoint) as proxy:
        settings = behind(proxy, name, tmp_path)

        # Killed while parts are sent.
        with started(url, mebibytes, **settings) as builder:
            wait_until(lambda: most_writes(proxy) >= 4)  # more than what begins an upload, or tries a copy
            builder.send_signal(signal.SIGKILL)
        assert store.head(KEY) is None

        # Killed while it is put in place: the object aside is removed by `clean`.
        proxy.reset_counts()
        proxy.set_faults([Fault("latency", "create", prefix(url, name), seconds=3600.0)])
        with started(url, mebibytes, **settings) as builder:
            wait_until(lambda: proxy.injected["latency"] == 1)
            builder.send_signal(signal.SIGKILL)
        proxy.set_faults([])
        assert store.head(KEY) is None
        left = aside(store)
        cleaned = run("clean", url).out
        assert left
        assert all(key in cleaned for key in left)
        assert aside(store) == []

        with started(url, mebibytes) as builder:
            said, _ = builder.communicate()
    report = json.loads(said.splitlines()[-1])
    assert report["made"] == 1
    assert report["peak"] < (mebibytes << 20) + OTHER_MEMORY  # it is in memory once
    assert hashlib.sha256(store.view(KEY)).hexdigest() == sha256
    assert aside(store) == []
    run("verify", url)


def most_writes(proxy: FaultProxy) -> int:
    """The writes of the object aside that has most of them."""
    keys = Counter(key for operation, key in list(proxy.log) if operation == "write" and ASIDE in key)
    return max(keys.values(), default=0)


def prefix(url: str, name: str) -> str:
    """What the path of the chunk begins with, as the proxy sees it: Azure has the account before the container."""
    bucket, _, below = url.partition("://")[2].partition("/")
    return f"{bucket}/{below}/{KEY}" if name == "az" else f"{below}/{KEY}"


def test_the_sizes_are_sent_in_parts() -> None:
    assert min(MEBIBYTES) << 20 >= 4 * PART_BYTES
    assert set(SERVICES) == {"s3", "s3-copies", "gs", "az"}
