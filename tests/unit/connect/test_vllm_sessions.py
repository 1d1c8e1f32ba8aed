"""Session hints of requests: invalid ones are ignored, names are scoped by tenant, the session gets them at the end."""

from typing import ClassVar

import pytest
from tests.vllm_engine import SmallEngine
from tests.vllm_engine_parts import Request

from kvtier.config.sections import Config, HostConfig
from kvtier.connect.vllm.requests import ConversationHint, conversation_hint
from kvtier.policy.base import Held
from kvtier.policy.lru import Lru
from kvtier.policy.registry import EVICTORS
from kvtier.types import NextTurn


def request(params: object = None, session_id: object = None, salt: str | None = None) -> Request:
    made = Request("r", [1], 1, 2)
    made.kv_transfer_params, made.session_id, made.cache_salt = params, session_id, salt  # type: ignore[assignment]
    return made


def hint_of(*args: object, **more: object) -> ConversationHint:
    return conversation_hint(request(*args, **more))[0]


def test_a_session_may_be_named_in_two_ways():
    named = hint_of({"session": "chat"})
    assert named == hint_of(session_id="chat") == hint_of({"session": "chat"}, session_id="other")
    assert named.conversation not in (None, "chat")
    assert named.next_turn is None
    assert hint_of() == hint_of({}) == ConversationHint()


@pytest.mark.parametrize("next_turn", list(NextTurn))
def test_the_next_turn_is_read(next_turn):
    assert hint_of({"session": "chat", "next_turn": next_turn.value}).next_turn is next_turn
    assert hint_of({"next_turn": next_turn.value}, session_id="chat").next_turn is next_turn


def test_tenants_cannot_name_each_others_sessions():
    names = [hint_of({"session": "chat"}, salt=salt).conversation for salt in (None, "alice", "bob")]
    assert len(set(names)) == 3
    assert hint_of({"session": "chat"}, salt="alice").conversation == names[1]
    # Nor by moving characters between salt and name.
    assert hint_of({"session": "bc"}, salt="a").conversation != hint_of({"session": "c"}, salt="ab").conversation


@pytest.mark.parametrize(
    ("params", "session_id", "what"),
    [
        ({"session": "a", "next_turn": "me"}, None, "next_turn = 'me'; allowed: 'tool', 'user', 'nobody'"),
        ({"session": "a", "next_turn": ["user"]}, None, "next_turn = ['user']; allowed"),
        ({"session": 7}, None, "session = 7; allowed: a non-empty string"),
        ({"session": ""}, None, "session = ''; allowed: a non-empty string"),
        ({"next_turn": "user"}, None, "next_turn = 'user'; allowed: only together with session or session_id"),
        (None, 7, "session = 7; allowed: a non-empty string"),
    ],
)
def test_an_invalid_hint_is_ignored_and_named(params, session_id, what):
    hint, problem = conversation_hint(request(params, session_id))
    assert hint.next_turn is None
    assert what in problem


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("cannot be shown")


def deep() -> list[object]:
    """More lists in one another than Python shows."""
    made: list[object] = []
    for _ in range(100_000):
        made = [made]
    return made


@pytest.mark.parametrize(
    "make", [deep, Unprintable, lambda: 10**10_000, lambda: ["x" * 1000] * 1000, lambda: "x" * 100_000]
)
@pytest.mark.parametrize("field", ["session", "next_turn"])
def test_a_value_that_cannot_be_printed_is_ignored_with_a_short_message(field, make):
    strange = make()
    hint, problem = conversation_hint(request({"session": "a", field: strange}))
    assert hint.next_turn is None
    assert len(problem) < 1000
    assert (hint == ConversationHint()) == (field == "session" and not isinstance(strange, str))


@pytest.mark.parametrize("params", [[], "user", 5, {"do_remote_prefill": True}])
def test_parameters_of_other_connectors_are_ignored(params):
    assert conversation_hint(request(params)) == (ConversationHint(), "")


class Heard(Lru):
    """An evictor that records conversations and hints."""

    owners: ClassVar[list[str | None]] = []
    said: ClassVar[list[tuple[str, NextTurn | None]]] = []

    def added(self, held: Held) -> None:
        self.owners.append(held.conversation)
        super().added(held)

    touched = added

    def expects(self, conversation, next_turn) -> None:
        self.said.append((conversation, next_turn))


def test_an_engine_passes_on_the_session_of_its_chunks_and_the_next_turn(start, monkeypatch):
    monkeypatch.setitem(EVICTORS, "heard", Heard)
    engine = start(config=Config(host=HostConfig(capacity_bytes="64MiB", evictor="heard")))
    prompt = [engine.draw.randrange(1000) for _ in range(1000)]
    for params in ({"session": "a", "next_turn": "user"}, {"session": "b"}, None, {"session": 5}):
        engine.ask(prompt, 1, kv_transfer_params=params)
        engine.settle()
        engine.forget()
    engine.close()
    a, b = (hint_of({"session": name}).conversation for name in "ab")
    assert Heard.said == [(a, NextTurn.USER)]
    # The first computes and stores it, the others load it.
    assert Heard.owners == [owner for owner in (a, b, None, None) for _ in range(3)]


def test_fields_of_other_programs_are_named_once_and_those_of_vllms_proxies_are_known(caplog):
    engine = SmallEngine()
    proxy = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": None}
    asked = [proxy, {"nextturn": "user", "remote_block_ids": [1]}, {"other": 1}, {"next_turn": "sometime"}]
    names: list[str] = []
    for params in asked:
        asking = engine.add(list(range(100)), 1, kv_transfer_params=params)
        names.append(asking.request_id)
    engine.close()
    foreign, wrong = (message for message in caplog.messages if "logged once" in message)
    assert foreign.startswith(f"request {names[1]}: kv_transfer_params has ['nextturn', 'remote_block_ids']; known: ")
    assert wrong.startswith(f"request {names[3]}: next_turn = 'sometime'; allowed")
