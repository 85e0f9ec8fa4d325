"""A service that does not answer is reported while it is tried, until its first answer."""

import logging
import os
import signal
import socket
import subprocess

import pytest
from tests.cli.running import COMMAND, run_process

from forebay.store.retries import awaited, note_answer, report_retry


@pytest.fixture
def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def environment(endpoint: str) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    return {**os.environ, **keys, "AWS_ENDPOINT_URL": endpoint, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "last"),
    [
        (
            ("info", "s3://b/x"),
            "cannot list 'generations' in 's3://b/x': no answer from {}: connection refused",
        ),
        (("build", "tokens", "hub:org/x", "--text", "t", "--into", "c"), "the hub at {} returned no usable answer for"),
    ],
)
def test_a_refused_connection_is_reported_at_every_attempt_and_in_one_line_at_the_end(
    closed_port: str, words: tuple[str, ...], last: str
) -> None:
    if words[0] == "info":
        pytest.importorskip("obstore")
    said = run_process(*words, code=1, env=environment(closed_port)).err.splitlines()
    retries = [line for line in said if "trying again" in line]
    assert [line.partition("again ")[2] for line in retries] == ["(2 of 3)", "(3 of 3)"]
    assert all(line.startswith(f"note: no answer from {closed_port}: ") for line in retries)
    assert [line for line in said if line.startswith(f"error: {last.format(closed_port)}")] == [said[-2]]
    assert said[-1].startswith("hint: ")


def test_a_service_that_stays_silent_is_reported_before_the_attempt_ends() -> None:
    pytest.importorskip("obstore")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(
            [*COMMAND, "info", "s3://b/x"], env=environment(endpoint), stderr=subprocess.PIPE, text=True
        ) as waiting:
            assert waiting.stderr is not None
            said = waiting.stderr.readline()
            waiting.send_signal(signal.SIGKILL)
    assert said == f"note: no answer from {endpoint} yet; still trying\n"


def test_nothing_is_reported_of_a_service_that_has_answered(caplog: pytest.LogCaptureFixture) -> None:
    report_retry("http://new.example", "refused", 2, 3)
    note_answer("http://old.example")
    with caplog.at_level(logging.WARNING), awaited("http://old.example"):
        report_retry("http://old.example", "refused", 2, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "no answer from http://new.example: refused; trying again (2 of 3)"
    ]
