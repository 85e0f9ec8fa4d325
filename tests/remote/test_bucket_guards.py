"""Guards of the store of objects and of its client that only odd names, environments and moments reach."""

import pickle
from collections.abc import Iterator

import pytest
from tests.helpers.fault_proxy import Fault, FaultProxy
from tests.remote.test_bad_buckets import refused, service  # noqa: F401, a fixture
from tests.remote.test_lying_services import LastPage
from tests.remote.test_lying_services import service as lying  # noqa: F401, a fixture

from forebay.errors import StoreRefused
from forebay.store import bucket_client, object_bodies, object_store, open_store
from forebay.store.base import BadCopy, Expected
from forebay.store.bucket_client import parse_url
from forebay.store.object_store import ObjectStore
from forebay.store.retries import RetryPolicy

FULL = [f"key{number}" for number in range(10)]  # a page, as `lying` asks for them
WITHOUT_SUM = bytes(range(256)) * 512


@pytest.fixture
def store(bucket: str) -> ObjectStore:
    return open_store(f"{bucket}/guards")


def put_plainly(store: ObjectStore, key: str, value: bytes) -> None:
    """As another tool does: without metadata, whatever the name."""
    store._writer(0).put(key, value, use_multipart=False)


def test_objects_with_names_that_no_cache_uses_are_not_listed(store: ObjectStore) -> None:
    for key in ("a/good", "a/back\\slash", "back\\slash/b"):
        put_plainly(store, key, b"x")
    assert [entry.key for entry in store.entries("")] == ["a/good"]
    assert store.folders("") == ["a"]


@pytest.fixture
def proxied(s3: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FaultProxy, ObjectStore]]:
    """A store with the object "x", read in pieces, whose client does not try again by itself."""
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setattr(bucket_client, "_RETRIES", {"max_retries": 0})
        monkeypatch.setattr(object_store, "PIECE_BYTES", 1 << 10)
        store = open_store(f"{bucket}/guards")
        assert isinstance(store, ObjectStore)
        put_plainly(store, "x", WITHOUT_SUM)
        yield proxy, store


def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range has no digest of its own: only the etag says that the rest belongs to the same object."""
    proxy, store = proxied
    proxy.set_faults([Fault("short-body", "read", most=1)])
    monkeypatch.setattr(object_store.time, "sleep", lambda _: put_plainly(store, "x", WITHOUT_SUM[::-1]))
    assert store.read("x", 1) == WITHOUT_SUM[::-1][1:]
    assert proxy.injected["short-body"] == 1


def test_a_damaged_object_is_returned_as_it_is_after_a_second_read(
    s3: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_store(f"{bucket}/guards")
        attributes = {object_bodies.SHA256: "0" * 64}
        store._writer(0).put("x", b"damaged", attributes=attributes, use_multipart=False)
        assert store.read("x") == b"damaged"
        assert proxy.requests["read"] == 2


def test_a_view_that_differs_is_fetched_once_more(s3: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_store(f"{bucket}/guards")
        put_plainly(store, "x", WITHOUT_SUM)
        expect = Expected(len(WITHOUT_SUM), object_store.hashlib.sha256(WITHOUT_SUM).digest())
        proxy.set_faults([Fault("flipped-bit", "read", most=1)])
        assert store.view("x", expect=expect) == WITHOUT_SUM
        proxy.set_faults([Fault("flipped-bit", "read", most=2)])
        with pytest.raises(BadCopy):
            store.view("x", expect=expect)


def test_a_view_of_an_object_that_is_longer_than_expected_is_a_bad_copy(store: ObjectStore) -> None:
    """Its beginning has the right digest: another has appended to it."""
    put_plainly(store, "x", WITHOUT_SUM + b"more")
    with pytest.raises(BadCopy, match="bytes"):
        store.view("x", expect=Expected(len(WITHOUT_SUM), object_store.hashlib.sha256(WITHOUT_SUM).digest()))


def test_a_store_that_was_probed_is_not_probed_again_in_another_process(
    s3: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_store(f"{bucket}/guards")
        assert store.create("a", [b"1"])
        sent = pickle.dumps(store)
        monkeypatch.setattr(object_store, "_honors_conditions", set())  # as in a process that starts
        proxy.reset_counts()
        assert pickle.loads(sent).create("b", [b"2"])
        assert proxy.requests == {"create": 1}


def test_a_listing_without_order_is_not_resumed(lying, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """What follows its last key is not the rest of it, so the error is the answer."""
    monkeypatch.setattr(object_store, "RETRIES", RetryPolicy(first_wait=0))

    def pages():
        yield FULL[::-1]
        while True:
            yield ["<broken"]

    lying.pages = pages()
    with pytest.raises(OSError, match="list"):
        list(ObjectStore("s3://bucket").walk(""))
    assert len(lying.requests) <= 5


def test_a_sorted_listing_is_resumed_after_its_last_key(lying, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(object_store, "RETRIES", RetryPolicy(first_wait=0))
    lying.pages = iter([FULL, ["<broken"], ["<broken"], LastPage(["last"])])
    assert [entry.key for entry in ObjectStore("s3://bucket").walk("")] == [*FULL, "last"]
    assert f"start-after={FULL[-1]}" in lying.requests[-1][1]


@pytest.mark.parametrize("url", ["s3://", "s3://bucket/../x", "s3://bucket/./x", "s3://bucket/a//../b"])
def test_a_url_without_a_bucket_or_with_dots_is_refused(url: str) -> None:
    with pytest.raises(StoreRefused, match="not the URL of a bucket"):
        parse_url(url)


def test_a_url_with_a_secret_is_refused_without_it() -> None:
    with pytest.raises(StoreRefused) as caught:
        parse_url("s3://key:hidden@bucket/x?token=hidden")
    assert "hidden" not in str(caught.value)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that names nothing."""
    names = [*bucket_client._PROXIES, *bucket_client._KEYS, *bucket_client._CREDENTIAL_URLS]
    names += [name.lower() for name in bucket_client._PROXIES] + list(bucket_client._ENDPOINTS["s3"])
    for name in names:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_hosts_that_a_client_may_ask(plain: pytest.MonkeyPatch) -> None:
    def excluded() -> list[str]:
        return bucket_client._only_named_hosts("s3")["proxy_excludes"].split(",")

    assert bucket_client._only_named_hosts("s3") == {}, "the provider's own"
    plain.setenv("AWS_ENDPOINT_URL", "http://storage.example:9000")
    assert {"storage.example", "amazonaws.com", "169.254.0.0/16"} <= set(excluded())
    plain.setenv("AWS_ENDPOINT_URL_STS", "https://sts.example")
    assert "sts.example" in excluded()
    plain.setenv("AWS_ACCESS_KEY_ID", "key")
    assert set(excluded()) == {"storage.example", "sts.example"}, "with a key, nobody is asked for credentials"
    for name in ("HTTPS_PROXY", "https_proxy"):
        plain.setenv(name, "http://proxy.example")
        assert bucket_client._only_named_hosts("s3") == {}, "a proxy decides"
        plain.delenv(name)


def test_a_prefix_that_could_lead_elsewhere_is_refused(store: ObjectStore) -> None:
    with pytest.raises(StoreRefused):
        list(store.entries("../x"))
    with pytest.raises(StoreRefused):
        store.folders("../x")


@pytest.mark.parametrize("more", [7, -3])
def test_a_service_that_sends_more_or_less_than_was_asked_for(service, more: int) -> None:  # noqa: F811
    """A range has no digest of its own: too much is cut off, and what is missing is asked for."""
    value = bytes(range(100))

    def get(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = value[first : last + 1 + more] or value[first : last + 1]
        ranged = {"Content-Range": f"bytes {first}-{last}/{len(value)}"}
        self._send(206, body, ETag='"x"', Last_Modified="Mon, 16 Nov 2026 17:00:00 GMT", **ranged)

    service.do_GET = get
    assert ObjectStore("s3://bucket").read("k", 10, 30) == value[10:30]


@pytest.mark.parametrize("seen", ["nothing", "a part"])
def test_a_create_that_appears_late_is_its_own(service, monkeypatch: pytest.MonkeyPatch, seen: str) -> None:  # noqa: F811
    """The reply is lost, the object is not seen yet or is still being copied, and the first refuses the next."""
    monkeypatch.setattr(bucket_client, "_RETRIES", {"max_retries": 0})
    asked: list[str] = []
    usual = service._any

    def late(self) -> None:
        asked.append(self.command)
        if self.command == "PUT" and asked.count("PUT") == 1:
            sent = {name: value for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")}
            self.values[self.path] = (self.rfile.read(int(self.headers["Content-Length"])), sent)
            self._send(500, b"<Error><Code>InternalError</Code></Error>")
        elif self.command == "PUT":
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        elif asked.count("PUT") < 2 and seen == "a part":
            kept, sent = self.values[self.path]
            self._send(200, kept[:1], ETag='"x"', Last_Modified="Mon, 16 Nov 2026 17:00:00 GMT", **sent)
        elif asked.count("PUT") < 2:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            usual(self)

    service.do_PUT = service.do_HEAD = service.do_GET = late
    assert ObjectStore("s3://bucket", probed=True).create("k", [b"mine"])
    assert asked.count("PUT") == 2
