"""What requests say of their sessions: read leniently, scoped by tenant, and passed on when they end."""

import logging
from typing import ClassVar

import pytest
from tests.vllm_engine import SmallEngine
from tests.vllm_engine_parts import Request

from kvtier.config.sections import Config, HostConfig
from kvtier.connect.vllm.sessions import Said, Sessions
from kvtier.policy.base import Held
from kvtier.policy.lru import Lru
from kvtier.policy.registry import EVICTORS
from kvtier.types import NextTurn


def request(params: object = None, session_id: object = None, salt: str | None = None) -> Request:
    made = Request("r", [1], 1, 2)
    made.kv_transfer_params, made.session_id, made.cache_salt = params, session_id, salt  # type: ignore[assignment]
    return made


def said(*args: object, **more: object) -> Said:
    return Sessions().said(request(*args, **more))


def test_a_session_may_be_named_in_two_ways():
    named = said({"session": "chat"})
    assert named == said(session_id="chat") == said({"session": "chat"}, session_id="other")
    assert named.session not in (None, "chat")
    assert named.next_turn is None
    assert said() == said({}) == Said()


@pytest.mark.parametrize("next_turn", list(NextTurn))
def test_who_goes_on_is_told_with_it(next_turn):
    assert said({"session": "chat", "next_turn": next_turn.value}).next_turn is next_turn
    assert said({"next_turn": next_turn.value}, session_id="chat").next_turn is next_turn


def test_tenants_cannot_speak_of_each_others_sessions():
    names = [said({"session": "chat"}, salt=salt).session for salt in (None, "alice", "bob")]
    assert len(set(names)) == 3
    assert said({"session": "chat"}, salt="alice").session == names[1]
    # Nor by a name that says who they are.
    assert said({"session": "bc"}, salt="a").session != said({"session": "c"}, salt="ab").session


@pytest.mark.parametrize(
    ("params", "session_id", "what"),
    [
        ({"session": "a", "next_turn": "me"}, None, "next_turn = 'me'; allowed: 'tool', 'user', 'nobody'"),
        ({"session": "a", "next_turn": ["user"]}, None, "next_turn = ['user']; allowed"),
        ({"session": 7}, None, "session = 7; allowed: a text"),
        ({"session": ""}, None, "session = ''; allowed: a text"),
        ({"next_turn": "user"}, None, "next_turn = 'user'; allowed: with session or session_id"),
        (None, 7, "session = 7; allowed: a text"),
    ],
)
def test_what_makes_no_sense_is_ignored_with_one_warning(caplog, params, session_id, what):
    sessions = Sessions()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert sessions.said(request(params, session_id)).next_turn is None
    assert len(caplog.records) == 1
    assert what in caplog.text


class Untold:
    def __repr__(self) -> str:
        raise ValueError("nobody can show it")


def deep() -> list[object]:
    """More lists in one another than Python shows."""
    made: list[object] = []
    for _ in range(100_000):
        made = [made]
    return made


@pytest.mark.parametrize("make", [deep, Untold, lambda: 10**10_000, lambda: ["x" * 1000] * 1000, lambda: "x" * 100_000])
@pytest.mark.parametrize("field", ["session", "next_turn"])
def test_what_nobody_can_show_breaks_nothing_and_does_not_fill_the_log(caplog, field, make):
    strange = make()
    named = said({"session": "a", field: strange})
    assert named.next_turn is None
    assert len(caplog.text) < 1000
    if field == "session" and not isinstance(strange, str):
        assert named == Said()
    else:
        assert named.session is not None


@pytest.mark.parametrize("params", [[], "user", 5, {"do_remote_prefill": True}])
def test_what_is_meant_for_others_is_none_of_our_business(caplog, params):
    assert said(params) == Said()
    assert not caplog.records


class Heard(Lru):
    """An evictor that notes whose names it is told of, and what sessions say."""

    owners: ClassVar[list[str | None]] = []
    said: ClassVar[list[tuple[str, NextTurn | None]]] = []

    def added(self, held: Held) -> None:
        self.owners.append(held.session)
        super().added(held)

    touched = added

    def expects(self, session, next_turn) -> None:
        self.said.append((session, next_turn))


def test_an_engine_passes_on_whose_chunks_they_are_and_who_goes_on(monkeypatch):
    monkeypatch.setitem(EVICTORS, "heard", Heard)
    engine = SmallEngine(config=Config(host=HostConfig(capacity_bytes="64MiB", evictor="heard")))
    try:
        prompt = [engine.draw.randrange(1000) for _ in range(1000)]
        for params in ({"session": "a", "next_turn": "user"}, {"session": "b"}, None, {"session": 5}):
            engine.add(prompt, 1, kv_transfer_params=params)
            engine.run()
            engine.settle()
            engine.forget()
    finally:
        engine.close()
    a, b = (said({"session": name}).session for name in "ab")
    assert Heard.said == [(a, NextTurn.USER)]
    # The first computes and stores it, the others load it.
    assert Heard.owners == [owner for owner in (a, b, None, None) for _ in range(3)]
