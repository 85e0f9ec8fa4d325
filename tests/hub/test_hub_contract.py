"""A data set of the hub keeps the contract of sources."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.hub.data_sets import shard
from tests.hub.server import HubServer

from forebay.hub import RetryPolicy
from forebay.source import Source
from forebay.sources.hub_datasets import hub as hub_source
from forebay.sources.hub_datasets import release
from forebay.testing import SourceContract


class TestHub(SourceContract):
    helpers = ("folder", "repository")
    """A line of a content is a document; its file is a shard."""

    suffix = ".parquet"
    broken = shard(["good", None, "", "also good"])

    @pytest.fixture(autouse=True)
    def serve(self, hub: HubServer, tmp_path: Path) -> Iterator[None]:
        self.hub, self.spool = hub, tmp_path / "spool"
        yield
        release()

    def open_source(self, folder: Path) -> Source:
        self.hub.add("org/set", {path.name: path.read_bytes() for path in folder.iterdir()})
        source = hub_source("org/set", endpoint=self.hub.address, spool=self.spool)
        return replace(source, patience=RetryPolicy(timeout=5, first_wait=0.01))

    def samples_of(self, content: bytes) -> list[str]:
        return content.decode("latin-1").removesuffix("\n").split("\n") if content else []

    def stored(self, content: bytes) -> bytes:
        return shard(self.samples_of(content), rows_per_group=50)

    def test_a_file_that_changed_has_another_identity(self, folder: Path) -> None:
        """At its commit a file never changes; at the next one it is another."""
        before = self.write(folder, {"a": b"one\n"})
        after = self.write(folder, {"a": b"two\n"})
        (old,), (new,) = before.files(), after.files()
        assert old.path == new.path
        assert not old.same_identity(new)
        assert before.look(old.path).same_identity(old)

    def test_a_file_that_is_gone_is_not_found(self, folder: Path) -> None:
        before = self.write(folder, {"a": b"one\n", "b": b"two\n"})
        (folder / "a.parquet").unlink()
        after = self.open_source(folder)
        (file, _) = before.files()
        with pytest.raises(FileNotFoundError):
            after.look(file.path)
        with pytest.raises(FileNotFoundError):
            after.digest(file, 0, 10)

    test_a_file_that_grew_is_appended = None
