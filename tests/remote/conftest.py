import os
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
from tests.remote.servers import (
    azure_environment,
    azure_server,
    azurite,
    gcs_environment,
    gcs_server,
    make_container,
    request,
    s3_environment,
    s3_server,
)

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def _fork_server_of_this_environment() -> Iterator[None]:
    """A fork server keeps the environment that it was started in: one that another test started has no credentials."""
    forkserver._forkserver._stop()
    yield
    forkserver._forkserver._stop()


@pytest.fixture(scope="session")
def s3(tmp_path_factory) -> str:
    """The endpoint of an S3 service."""
    pytest.importorskip("ministack")
    with s3_server(str(tmp_path_factory.mktemp("s3"))) as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3, tmp_path, monkeypatch) -> str:
    """The URL of an empty bucket; the environment has its credentials, also for child processes."""
    return _new_bucket(s3, tmp_path, monkeypatch)


def _new_bucket(s3, tmp_path, monkeypatch) -> str:
    name = f"b{abs(hash(str(tmp_path))):x}"
    assert request("PUT", f"{s3}/{name}") == 200
    for variable, value in s3_environment(s3).items():
        monkeypatch.setenv(variable, value)
    return f"s3://{name}"


@pytest.fixture(scope="session")
def gcs(tmp_path_factory) -> str:
    with gcs_server(str(tmp_path_factory.mktemp("gcs"))) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def azure(tmp_path_factory) -> str:
    if azurite() is None:
        pytest.skip("Azurite is not installed: npm install --prefix .venv/azurite azurite")
    with azure_server(str(tmp_path_factory.mktemp("azure"))) as endpoint:
        yield endpoint


@pytest.fixture
def gcs_bucket(gcs, tmp_path, monkeypatch) -> str:
    name = f"b{abs(hash(str(tmp_path))):x}"
    assert request("PUT", f"{gcs}/{name}") == 200
    for variable, value in gcs_environment(gcs, str(tmp_path)).items():
        monkeypatch.setenv(variable, value)
    return f"gs://{name}"


@pytest.fixture
def container(azure, tmp_path, monkeypatch) -> str:
    name = f"b{abs(hash(str(tmp_path))):x}"
    make_container(azure, name)
    for variable, value in azure_environment(azure).items():
        monkeypatch.setenv(variable, value)
    return f"az://{name}"


@pytest.fixture(autouse=True)
def no_credentials_from_here(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
