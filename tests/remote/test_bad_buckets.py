"""What a user may get wrong about a bucket: one line each, with what to do, and never a secret."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.cli.running import run
from tests.helpers.cache_files import chunk_key
from tests.remote.servers import SECRET, s3_environment

from forebay.errors import StoreRefused
from forebay.store import open_store
from forebay.store.retries import RetryPolicy


def refused(*words: object) -> str:
    ran = run(*words, code=1)
    lines = [line for line in ran.err.splitlines() if not line.startswith("planning ")]  # on a busy machine
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"], ran.err
    assert SECRET not in ran.err
    return "; ".join(line.partition(": ")[2] for line in lines) + "\n"


@pytest.fixture
def lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    return tmp_path / "a.txt"


class Service(BaseHTTPRequestHandler):
    """Answers every request alike, or keeps objects and ignores conditions."""

    protocol_version = "HTTP/1.1"
    answer: tuple[int, str] | None = None
    writes: tuple[int, str] | None = None
    values: dict[str, tuple[bytes, dict[str, str]]]

    def log_message(self, *_):
        pass

    def _send(self, status, body=b"", **fields):
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def _any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fixed = self.answer or (self.writes if self.command in ("PUT", "POST", "DELETE") else None)
        if fixed:
            self._send(fixed[0], f"<Error><Code>{fixed[1]}</Code></Error>".encode())
        elif self.command == "PUT":
            meta = {name: value for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")}
            self.values[self.path] = (body, meta)
            self._send(200, ETag='"x"')
        elif self.path.partition("?")[0] in self.values and self.command in ("GET", "HEAD"):
            value, meta = self.values[self.path]
            self._send(200, value, ETag='"x"', Last_Modified="Mon, 16 Nov 2026 17:00:00 GMT", **meta)
        elif "list-type" in self.path:
            self._send(200, b"<?xml version='1.0'?><ListBucketResult></ListBucketResult>")
        elif self.command == "POST":
            self._send(200, b"<DeleteResult></DeleteResult>")
        else:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _any


@pytest.fixture
def service(monkeypatch):
    """A service whose answers the test decides."""
    kind = type("Service", (Service,), {"values": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for name, value in s3_environment(f"http://127.0.0.1:{server.server_port}").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("forebay.store.bucket_client._RETRIES", {"max_retries": 1})
    yield kind
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_missing_bucket(bucket, lines):
    for words in (("status", "s3://nobody-has-this/x"), ("build", "raw", lines, "--into", "s3://nobody-has-this/x")):
        assert "there is no bucket 'nobody-has-this'; create it, or check the name" in refused(*words)


def test_no_credentials(service, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("forebay.store.object_store.RETRIES", RetryPolicy(retries=0))
    said = refused("status", "s3://bucket/x")
    assert "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, as `aws configure" in said


def test_no_account():
    said = refused("status", "az://container/x")
    assert "no account is named; set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY" in said


def test_a_missing_container(container):
    assert "there is no container 'nobody-has-this'; create it" in refused("status", "az://nobody-has-this/x")


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_wrong_credentials(service, code):
    service.answer = (403, code)
    said = refused("status", "s3://bucket/x")
    assert "the credentials do not allow to read it; ask for that permission, or check AWS_* in the environment" in said


@pytest.mark.parametrize("says", ["<Region>eu-west-1</Region>", "<Message>expecting 'eu-west-1'</Message>"])
def test_a_wrong_region_where_the_service_names_the_right_one(service, says):
    service.answer = (400, f"AuthorizationHeaderMalformed</Code>{says}<Code>")
    assert "the bucket is in another region; set AWS_REGION=eu-west-1\n" in refused("status", "s3://bucket/x")


def test_a_read_only_bucket(service, lines):
    service.writes = (403, "AccessDenied")
    said = refused("build", "raw", lines, "--into", "s3://bucket/x")
    assert "the credentials do not allow to write to it" in said


def test_a_bucket_that_ignores_conditions(service, lines, tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.store.object_store.RETRIES", RetryPolicy(retries=1, first_wait=0))
    said = refused("build", "raw", lines, "--into", "s3://bucket/x")
    assert "it ignores `If-None-Match: *`" in said
    assert "build into a folder and upload that with its own tool" in said
    run("build", "raw", lines, "--into", tmp_path / "local")
    assert said == refused("copy", tmp_path / "local", "s3://bucket/x")  # so `copy` is no way out
    chunk = chunk_key(tmp_path / "local", "raw", 0)
    value = (tmp_path / "local" / chunk).read_bytes()
    service.values[f"/bucket/x/{chunk}"] = (value, {})  # by another tool, without metadata
    assert open_store("s3://bucket/x").view(chunk) == value


def test_a_service_without_conditional_writes(service, lines, monkeypatch):
    service.writes = (501, "NotImplemented")
    assert "does not support conditional writes" in refused("build", "raw", lines, "--into", "s3://bucket/x")


def test_a_full_service(service):
    service.writes = (507, "InsufficientStorage")
    with pytest.raises(OSError, match="has no space for 'key'"):
        open_store("s3://bucket/y").replace("key", [b"x"])


def test_an_endpoint_without_tls(service, monkeypatch):
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    assert "set AWS_ALLOW_HTTP=true if you trust the network" in refused("status", "s3://bucket/x")


def test_a_chunk_that_no_service_takes_in_one_request(bucket, monkeypatch):
    monkeypatch.setattr("forebay.store.object_bodies.MOST_BYTES", 1000)
    with pytest.raises(StoreRefused, match="choose smaller chunks"):
        open_store(f"{bucket}/a").create("key", [bytes(1001)])


@pytest.mark.parametrize("endpoint", ["storage.example:9000", "nonsense", "https://"])
def test_an_endpoint_that_is_not_a_url(monkeypatch, endpoint):
    for name, value in s3_environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert f"AWS_ENDPOINT_URL is '{endpoint}', which is not a URL" in refused("info", "s3://bucket/cache")
