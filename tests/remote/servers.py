"""Storage services on loopback, each a process of its own: S3 (ministack), Azure (Azurite) and Google Cloud Storage."""

import base64
import hashlib
import hmac
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from types import MappingProxyType

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
SECRET = "wJalrXUtnFEMI-never-printed"


def free_port() -> int:
    """A port that nothing listens on, below those that the kernel gives to clients: no client takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def request(method: str, url: str) -> int:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=600) as answer:
        return int(answer.status)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        assert process.poll() is None, f"the server at {url} ended with {process.returncode}"
        with closing(socket.socket()) as probe:
            host, _, port = url.removeprefix("http://").partition(":")
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens at {url}")


@contextmanager
def s3_server(folder: str) -> Iterator[str]:
    """The endpoint of an empty S3 service."""
    environment = {"GATEWAY_PORT": "{port}", "BIND_HOST": "127.0.0.1", "SERVICES": "s3", "LOG_LEVEL": "ERROR",
                   "TMPDIR": folder}  # fmt: skip
    with _server([sys.executable, "-m", "ministack"], folder, "s3.log", environment) as url:
        yield url


@contextmanager
def gcs_server(folder: str) -> Iterator[str]:
    """The endpoint of an empty Google Cloud Storage service."""
    with _server([sys.executable, "-m", "tests.remote.gcs_server", "{port}"], folder, "gcs.log") as url:
        yield url


def azurite() -> str | None:
    """The program of Azurite: on the path, or where `make setup` installs it."""
    beside = os.path.join(os.path.dirname(os.path.dirname(sys.executable)), "azurite/node_modules/.bin")
    return shutil.which("azurite-blob") or shutil.which("azurite-blob", path=beside)


@contextmanager
def azure_server(folder: str) -> Iterator[str]:
    """The endpoint of an empty Azure Blob Storage service."""
    program = azurite()
    assert program is not None
    words = [program, "--blobHost", "127.0.0.1", "--blobPort", "{port}", "--inMemoryPersistence",
             "--skipApiVersionCheck", "--silent", "--disableTelemetry"]  # fmt: skip
    with _server(words, folder, "azure.log") as url:
        yield url


@contextmanager
def _server(
    words: list[str], folder: str, name: str, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    port = free_port()
    variables = {**os.environ, **{key: value.format(port=port) for key, value in environment.items()}}
    with open(os.path.join(folder, name), "wb") as log:
        words = [word.format(port=port) for word in words]
        process = subprocess.Popen(words, env=variables, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process)
        yield url
    finally:
        process.kill()
        process.wait()


def gcs_environment(endpoint: str, folder: str) -> dict[str, str]:
    account = os.path.join(folder, "account.json")
    described = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "x", "private_key": "",
                 "private_key_id": ""}  # fmt: skip
    with open(account, "w") as file:
        json.dump(described, file)
    return {"GOOGLE_SERVICE_ACCOUNT": account, "GOOGLE_ALLOW_HTTP": "true"}


def azure_environment(endpoint: str) -> dict[str, str]:
    """The account that every Azurite has."""
    return {
        "AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": endpoint, "AZURE_ALLOW_HTTP": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
    }  # fmt: skip


def make_container(endpoint: str, name: str) -> None:
    """Create an Azure container, signed with the account's key."""
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
    place = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signed = "PUT" + 12 * "\n" + f"x-ms-date:{date}\nx-ms-version:2021-08-06\n{place}"
    key = hmac.new(base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256).digest()
    fields = {"x-ms-date": date, "x-ms-version": "2021-08-06", "Content-Length": "0",
              "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(key).decode()}"}  # fmt: skip
    url = f"{endpoint}/{ACCOUNT}/{name}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=fields), timeout=600) as answer:
        assert answer.status == 201


def s3_environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": SECRET,
    }  # fmt: skip
