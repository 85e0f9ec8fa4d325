"""Every store we ship keeps the contract."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled

from forebay.store import Entry, LocalStore, MemoryStore, Store
from forebay.testing import SharedStoreContract, StoreContract


class TestLocalStore(SharedStoreContract):
    helpers = ("writing",)

    def make_store(self, folder: Path) -> Store:
        return LocalStore(folder)

    def reopen(self, store: Store) -> partial[LocalStore]:
        return partial(LocalStore, store.address)


class TestMemoryStore(StoreContract):
    def make_store(self, folder: Path) -> Store:
        return MemoryStore()


class MisspelledStore(MemoryStore):
    def veiw(self, key: str) -> bytes:
        return self.read(key)

    def free_byte(self) -> int:
        return 0


def test_a_misspelt_method_fails_the_contract_of_a_store():
    with pytest.raises(AssertionError) as caught:
        TestMemoryStore().test_every_public_name_is_a_method_of_a_store(MisspelledStore())
    assert "not methods of a store: 'free_byte' (did you mean 'free_bytes'?), 'veiw' (did you mean 'view'?)" in str(
        caught.value
    )


KEYS = st.sampled_from(["a", "b", "f/a", "f/b", "f/g/a", "f-g"])
STEPS = st.lists(
    st.tuples(st.sampled_from(["create", "replace", "delete"]), KEYS, st.lists(st.binary(max_size=5), max_size=3)),
    max_size=12,
)


@given(steps=STEPS)
@settings(max_examples=scaled(25), deadline=None)
def test_every_store_is_a_dictionary_of_what_was_created_replaced_and_deleted(steps):
    with TemporaryDirectory() as folder:
        for store in (LocalStore(folder), MemoryStore()):
            model: dict[str, bytes] = {}
            for action, key, buffers in steps:
                if action == "create":
                    assert store.create(key, buffers) == (key not in model)
                    model.setdefault(key, b"".join(buffers))
                elif action == "replace":
                    store.replace(key, buffers)
                    model[key] = b"".join(buffers)
                else:
                    store.delete(key)
                    model.pop(key, None)
            assert list(store.entries("")) == [Entry(key, len(model[key])) for key in sorted(model)]
            assert {key: store.read(key) for key in model} == model
