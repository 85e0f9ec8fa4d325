"""Four builders on one bucket while answers are lost, doubled, late, short and wrong."""

import pytest
from tests.remote.fault_campaign import campaign


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    for name in ("AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "")  # restored afterwards: the campaign sets them


def check(outcome, answers):
    assert outcome.tracebacks == []
    assert outcome.is_clean, outcome
    assert sum(outcome.injected.values()) >= answers
    assert len(outcome.injected) >= 8
    assert outcome.creations
    assert outcome.chunks


@pytest.mark.slow
def test_a_bucket_is_not_confused_by_a_hundred_wrong_answers(tmp_path):
    check(campaign(tmp_path, 100), 100)


@pytest.mark.long
def test_a_bucket_is_not_confused_by_ten_thousand_wrong_answers(tmp_path):
    check(campaign(tmp_path, 10_000), 10_000)
