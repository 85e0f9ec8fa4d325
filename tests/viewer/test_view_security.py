"""What a foreign page, another machine or a hostile URL gets from the server: nothing."""

import http.client
import json
import socket
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from tests.teachers.own_teachers import Ramp, prompt_cache

import forebay as fb
from forebay.records import as_json
from forebay.teachers import TeacherRecipe
from forebay.viewer.image_rows import image_png
from forebay.viewer.page_records import answer, guarded
from forebay.viewer.shown_cache import BadQuery, Query, ShownCache
from forebay.viewer.token_rows import check_lengths
from forebay.viewer.web_app import Server


@contextmanager
def served(root: Path, **options: object) -> Iterator[Server]:
    server = Server([ShownCache.of(root)], **options).start()  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server(token_root: Path) -> Iterator[Server]:
    with served(token_root) as running:
        yield running


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    """The answer to a request whose path is sent as it is; `Host` is the server's own unless one is passed."""
    connection = http.client.HTTPConnection("127.0.0.1", server.address.port, timeout=600)
    connection.putrequest(method, path, skip_host=True)
    for name, value in ({"host": f"127.0.0.1:{server.address.port}"} | headers).items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), answer.headers
    connection.close()
    return found


def test_the_server_binds_to_this_machine_only(server: Server) -> None:
    assert server.address.host == "127.0.0.1"
    assert server.address.token == ""
    assert ask(server, "/")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_reading_is_possible(server: Server, method: str) -> None:
    for path in ("/", "/api/caches.json", "/api/0/row.json"):
        assert ask(server, path, method)[0] == 405


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "10.0.0.7", "[::]]", "a b"]
)
def test_a_name_that_was_pointed_here_is_refused(server: Server, host: str) -> None:
    assert ask(server, "/api/caches.json", host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1", "[::1]:80"])
def test_names_of_this_machine_are_served(server: Server, host: str) -> None:
    assert ask(server, "/api/caches.json", host=host)[0] == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:8888"])
def test_requests_of_other_origins_are_refused(server: Server, origin: str) -> None:
    assert ask(server, "/api/caches.json", origin=origin)[0] == 403
    own = f"http://127.0.0.1:{server.address.port}"
    assert ask(server, "/api/caches.json", origin=own)[0] == 200


@pytest.mark.slow
def test_a_foreign_page_can_link_here_but_load_nothing(server: Server) -> None:
    assert ask(server, "/api/0/summary.json", sec_fetch_site="cross-site", sec_fetch_mode="no-cors")[0] == 403
    assert ask(server, "/static/app.js", sec_fetch_site="same-site", sec_fetch_mode="cors")[0] == 403
    assert ask(server, "/", sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 200


TRAVERSALS = [
    "/static/../server.py",
    "/static/..%2fserver.py",
    "/static/%2e%2e/server.py",
    "/static/....//server.py",
    "/static//etc/passwd",
    "/static/%00",
    "/static/app.js%00.css",
    "/../../etc/passwd",
    "/api/../cache.json",
    "/api/7/summary.json",
    "/api/-1/summary.json",
    "/api/0/../../cache.json",
    "/api/0/nothing.json",
    "/api/%2e%2e/summary.json",
    "/api/0%2f..%2f0/summary.json",
    "/static/",
    "/static",
    "/api",
    "/cache.json",
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_path_leads_out_of_the_page(server: Server, path: str) -> None:
    status, text, _ = ask(server, path)
    assert status == 404
    assert "def " not in text
    assert "root:" not in text


BAD_QUERIES = ["row=-1", "row=x", "row=1e9", "row=99999999999999999999", "row=%00", "row=٣"]


@pytest.mark.parametrize("query", BAD_QUERIES)
def test_a_bad_number_is_a_clear_refusal(server: Server, query: str) -> None:
    status, text, _ = ask(server, f"/api/0/row.json?{quote(query, safe='=%')}")
    assert status == 400
    assert "whole number" in text


def test_what_does_not_exist_is_said_plainly(server: Server) -> None:
    assert ask(server, "/api/0/row.json?row=999999")[0] == 404
    assert ask(server, "/api/0/chunk.json?layer=tokens&chunk=999999")[0] == 404
    assert ask(server, "/api/0/chunk.json?layer=..%2f..&chunk=0")[0] == 404
    assert "error" in json.loads(ask(server, "/api/compare.json?generation_a=77")[1])


def test_every_answer_has_a_strict_policy(server: Server) -> None:
    for path in ("/", "/static/app.js", "/api/caches.json", "/nothing"):
        headers = ask(server, path)[2]
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
    assert ask(server, "/")[2]["content-type"].startswith("text/html")
    assert ask(server, "/api/0/peek.json")[2]["content-type"] == "application/json"


def test_beyond_this_machine_every_path_needs_the_token(token_root: Path) -> None:
    with served(token_root, host="0.0.0.0") as server:
        token = server.address.token
        assert len(token) >= 32
        assert str(server.address) == f"http://{socket.gethostname()}:{server.address.port}/{token}/"
        assert ask(server, f"/{token}/", host=socket.gethostname())[0] == 200
        for path in (
            "/",
            "/static/app.js",
            "/api/caches.json",
            f"/{token}",
            f"/{token}x/",
            "//",
            "/x/",
            f"/x/{token}/",
        ):
            assert ask(server, path)[0] == 403
        for path in ("/", "/static/app.js", "/api/caches.json"):
            assert ask(server, f"/{token}{path}")[0] == 200
        assert ask(server, f"/{token}/", host="evil.example")[0] == 403
        assert ask(server, f"/{token}/", host="10.0.0.7:80")[0] == 200
        assert ask(server, f"/{token}/../../etc/passwd")[0] == 404
        with served(token_root, host="0.0.0.0") as other:
            assert other.address.token != token


def test_a_row_with_documents_longer_than_itself_is_refused_before_memory_is_used():
    check_lengths(np.zeros(8, np.uint16), np.array([5, 3], np.uint32))
    with pytest.raises(ValueError, match="longer than its 8 tokens"):
        check_lengths(np.zeros(8, np.uint16), np.array([4_000_000_000, 4_000_000_000], np.uint32))


EXTREMES = (
    "0",
    "1",
    "999999999999",
    "1099511627776",
    "1099511627777",
    "1e9",
    "-1",
    "x",
    "0.5",
    "NaN",
    "\0",
    "٣",
    "9" * 400,
)
NUMBERS = {
    "chunk": ["chunk"],
    "row": ["row", "token"],
    "search": ["row"],
    "distribution": ["row"],
    "peek": ["row"],
    "images": ["row", "count", "patch"],
    "image": ["row", "patch"],
    "teacher": ["row", "t"],
    "training": ["seed", "epoch", "world", "batch", "at", "shuffle"],
    "picture": ["row", "side"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tokens", "images", "ramp"])
def test_no_number_in_an_address_is_an_error_or_takes_memory(
    token_root: Path, image_root: Path, tmp_path: Path, kind: str
) -> None:
    """Every record with its numbers at the extremes is refused, not found, or small."""
    roots = {"tokens": token_root, "images": image_root}
    if kind == "ramp":
        roots["ramp"] = prompt_cache(tmp_path, tuple(f"prompt {number}" for number in range(9)), chunk_bytes=60)
        fb.build(roots["ramp"], None, TeacherRecipe(teacher=Ramp(width=4)))
    shown, found = ShownCache.of(roots[kind]), Counter[str]()
    tracemalloc.start()
    try:
        for name, parameters in NUMBERS.items():
            for parameter in parameters:
                for value in EXTREMES:
                    query = Query(
                        (("layer", kind), ("chunk", "0"), ("text", "a"), ("row", "0"), (parameter, value))[::-1]
                    )
                    try:
                        if name == "picture":
                            guarded(shown, partial(image_png, shown, query))
                        else:
                            assert len(as_json(answer(shown, name, query))) < 1_000_000
                        found["made"] += 1
                    except (BadQuery, IndexError):
                        found["refused"] += 1
        assert tracemalloc.get_traced_memory()[1] < 150_000_000
    finally:
        tracemalloc.stop()
    assert min(found["made"], found["refused"]) > 50
