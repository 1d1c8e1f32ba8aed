"""Repeated faults are logged once per interval, with their number."""

import pytest

from kvtier.errors import KvError
from kvtier.runtime.observers.fault_log import KINDS_MAX, FaultLog
from kvtier.runtime.observers.health_record import DETAIL_CHARACTERS, described


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_the_first_of_each_kind_is_logged_at_once_then_one_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = _Clock()
    log = FaultLog(10.0, clock)
    for number in range(5):
        log.report("read", f"fault {number}")
        log.report("write", f"fault {number}")
    assert _lines(caplog) == ["read: fault 0", "write: fault 0"]
    clock.now_s = 9.9
    log.report("read", "still")
    assert _lines(caplog) == []
    clock.now_s = 10.0
    log.report("read", "still")
    assert _lines(caplog) == ["read: still (5 similar ones since the last line)"]
    clock.now_s = 20.0
    log.report("read", "again")
    assert _lines(caplog) == ["read: again"]


def test_kinds_beyond_the_limit_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog(10.0, _Clock())
    for number in range(KINDS_MAX + 50):
        log.report(f"kind {number}", "x")
    assert len(_lines(caplog)) == KINDS_MAX + 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://user:pa/ss@host/x failed", "GET https://(hidden)@host/x failed"),
        ("proxy http://user:pw secret@h", "proxy http://(hidden)@h"),
        ("http://u:p@h1 and http://u:p@h2", "http://(hidden)@h1 and http://(hidden)@h2"),
        ("http://key@h", "http://(hidden)@h"),
        ("token=abcdef has expired", "token=(hidden) has expired"),
        ("token: abc123def has expired", "token: (hidden) has expired"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic (hidden)"),
        ("sent Bearer eyJhbGciOiJ9", "sent Bearer (hidden)"),
        ('{"SessionToken": "a b", "x": 1}', '{"SessionToken": (hidden), "x": 1}'),
        ("AWS_SECRET_ACCESS_KEY=x y", "AWS_SECRET_ACCESS_KEY=(hidden)"),
        ("password: correct horse", "password:(hidden)"),
        ("a" * 490 + " ://user:" + "p" * 40 + "@host", "a" * 490 + " ://(hidden)@host"),
        ("h:9000 of http://h:9000/x: timed out", "h:9000 of http://h:9000/x: timed out"),
        ("https://h/a/b@c: not found", "https://h/a/b@c: not found"),
        ("ExpiredToken: The provided token has expired", "ExpiredToken: The provided token has expired"),
        ("auth token: timeout, basic authentication failed", "auth token: timeout, basic authentication failed"),
        ("AuthenticationError: WRONGPASS invalid username-password pair",) * 2,
        ("tiers.v.password = (hidden) (from flag): too long",) * 2,
        ("store.secret_file: /run/secrets/kvtier: no such file",) * 2,
        ("store.secret_file = '/srv/kv.secret': does not exist",) * 2,
        ("tier 'v': password file '/p.pass': token=x", "tier 'v': password file '/p.pass': token=(hidden)"),
        ("password='file '/srv/pass': x'", "password=(hidden)"),
        ("cannot open file '/mnt/token=abc123def': gone", "cannot open file '/mnt/token=(hidden) gone"),
        ("profile = '/x/secret=hunter2': gone", "profile = '/x/secret=(hidden)"),
        ("tiers.v.password_file = /srv/p (from flag): cannot be read",) * 2,
        ("store.secret_file = 'no-path'", "store.secret_file = (hidden)"),
        ("store.secret = '/srv/kv'", "store.secret =(hidden)"),
        ("bypass: 3 of 4",) * 2,
        ("SecretNotFoundError: 3 attempts to find the secret",) * 2,
    ],
)
def test_an_error_is_described_without_secrets_and_with_its_reason(text: str, shown: str) -> None:
    assert described(OSError(text)) == f"OSError: {shown}"[:DETAIL_CHARACTERS]
    assert described(KvError(text)) == shown[:DETAIL_CHARACTERS]


@pytest.mark.parametrize("part", ["://", "://a:", "@", "a", "token:", "token='", "token: ", "pass", "basic ", "auth-"])
def test_describing_a_long_error_takes_time_in_proportion_to_it(part: str) -> None:
    """With time that grows with the square of a text, a million characters would not end."""
    assert described(OSError(part * (10**6 // len(part))))
