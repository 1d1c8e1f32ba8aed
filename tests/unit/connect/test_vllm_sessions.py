"""Hints of requests: invalid ones are ignored, names are scoped by tenant, the session gets them at the end.

A request whose hints cannot be read in full opts out: nothing of it is stored.
"""

from functools import partial
from types import SimpleNamespace
from typing import ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.connect.test_vllm_scheduler import RUSH, WAYS
from tests.vllm_engine import SmallEngine
from tests.vllm_engine_parts import Request
from tests.waiting import wait_until

from kvtier.codec.frame import frame_bytes
from kvtier.config.sections import Config, HostConfig, LimitsConfig
from kvtier.connect.vllm.requests.hints import (
    NO_HINTS,
    OPTED_OUT,
    RequestHints,
    opts_out,
    request_hints,
    unknown_hints,
)
from kvtier.observe.metric_definitions import REFUSED_HINTS, RETAINED_BYTES
from kvtier.policy.base import Use
from kvtier.policy.lru import Lru
from kvtier.policy.registry import EVICTORS
from kvtier.types import NextTurn, Priority


def request(params: object = None, session_id: object = None, salt: str | None = None) -> Request:
    made = Request("r", [1], 1, 2)
    made.kv_transfer_params, made.session_id, made.cache_salt = params, session_id, salt  # type: ignore[assignment]
    return made


def hint_of(*args: object, **more: object) -> RequestHints:
    return request_hints(request(*args, **more))[0]


def test_a_session_may_be_named_in_two_ways():
    named = hint_of({"session": "chat"})
    assert named == hint_of(session_id="chat") == hint_of({"session": "chat"}, session_id="other")
    assert named.conversation not in (None, "chat")
    assert named.next_turn is None
    assert hint_of() == hint_of({}) == NO_HINTS


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
        ({"session": 7, "next_turn": "user"}, None, "session = 7; allowed"),
        ({"next_turn": "user"}, None, "next_turn = 'user'; allowed: a value together with session or session_id"),
        (None, 7, "session = 7; allowed: a non-empty string"),
    ],
)
def test_an_invalid_hint_is_ignored_and_named(params, session_id, what):
    hint, (problem,) = request_hints(request(params, session_id))
    assert hint.next_turn is None
    assert what in problem.text


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
    hint, problems = request_hints(request({"session": "a", field: strange}))
    assert hint.next_turn is None
    assert len(problems) == (field == "next_turn" or not isinstance(strange, str))
    assert all(len(problem.text) < 1000 for problem in problems)
    assert (hint == NO_HINTS) == (field == "session" and not isinstance(strange, str))


def test_parameters_of_other_connectors_are_ignored():
    assert request_hints(request({"do_remote_prefill": True})) == (NO_HINTS, [])


def envelope(payload: object, kind: object = "kvtier.hints", version: object = "1.0") -> dict[str, object]:
    """An envelope of `kv_hints`, as vLLM's struct looks as JSON."""
    action = {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


def as_struct(made: dict[str, object]) -> SimpleNamespace:
    actions = [SimpleNamespace(**each) for each in cast("list[dict[str, object]]", made["actions"])]
    return SimpleNamespace(protocol_version="0.1", message_id="m", actions=actions)


FIELDS = {"priority": "high", "retain_s": 60, "prefetch_in_s": 18.5, "max_offload_tokens": 512, "load": False}
READ = RequestHints(None, None, "high", 60.0, 18.5, 0, 512)


def test_hints_mean_the_same_in_every_place():
    assert request_hints(request()) == request_hints(request({})) == (NO_HINTS, [])
    assert request_hints(request(FIELDS)) == (READ, [])
    assert request_hints(request({"kv_hint": envelope(FIELDS)})) == (READ, [])
    made = request()
    made.kv_hints = as_struct(envelope(FIELDS))  # type: ignore[attr-defined]
    assert request_hints(made) == (READ, [])
    made.kv_hints = as_struct(envelope({"session": "chat", "next_turn": "user"}))  # type: ignore[attr-defined]
    assert request_hints(made)[0] == hint_of({"session": "chat", "next_turn": "user"})


def test_a_field_of_the_request_counts_more_than_one_of_an_envelope():
    params = {"retain_s": 5, "priority": None, "kv_hint": envelope({"retain_s": 9, "priority": "low", "load": True})}
    assert request_hints(request(params)) == (RequestHints(priority="low", retain_s=5.0), [])


def test_vllms_own_limits_are_read():
    limits = {"max_load_tokens": 512, "max_offload_tokens": 256}
    assert request_hints(request(limits)) == (RequestHints(max_load_tokens=512, max_offload_tokens=256), [])
    assert request_hints(request({**limits, "load": False, "store": True}))[0].max_load_tokens == 0


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("priority", "urgent", "priority = 'urgent'; allowed: 'low', 'normal', 'high'"),
        ("priority", 5, "priority = 5; allowed"),
        ("retain_s", -1, "retain_s = -1; allowed: a number of seconds, 0 to 1e9"),
        ("retain_s", True, "retain_s = True; allowed"),
        ("retain_s", float("nan"), "retain_s = nan; allowed"),
        ("retain_s", float("inf"), "retain_s = inf; allowed"),
        pytest.param("retain_s", 10**10_000, "retain_s = a value of type int; allowed", id="long"),
        ("prefetch_in_s", "18", "prefetch_in_s = '18'; allowed"),
        ("load", "no", "load = 'no'; allowed"),
        ("max_load_tokens", -5, "max_load_tokens = -5; allowed: a number of tokens, 0 or more"),
    ],
)
@pytest.mark.parametrize("is_in_an_envelope", [False, True])
def test_an_invalid_hint_is_ignored_and_the_others_count(field, value, what, is_in_an_envelope):
    fields = {"retain_s": 3, "max_load_tokens": 7, field: value}
    hints, problems = request_hints(request({"kv_hint": envelope(fields)} if is_in_an_envelope else fields))
    assert hints == RequestHints(
        retain_s=None if field == "retain_s" else 3.0, max_load_tokens=None if field == "max_load_tokens" else 7
    )
    assert [problem.field for problem in problems] == [field]
    assert what in problems[0].text


def test_an_action_that_is_not_for_kvtier_is_named_and_not_used():
    asked = request({"kv_hint": envelope({"source": "tcp://x"}, "kv.fetch", "1.0")})
    assert request_hints(asked) == (NO_HINTS, [])
    assert "kv_hint has the action 'kv.fetch' '1.0'; known: " in unknown_hints(asked)


OTHERS = cast("list[object]", envelope({}, "other")["actions"]) * 64


def test_the_first_actions_of_an_envelope_are_read():
    actions = [*OTHERS[1:], *cast("list[object]", envelope({"retain_s": 5})["actions"])]
    assert request_hints(request({"kv_hint": {"actions": actions}})) == (RequestHints(retain_s=5.0), [])


@pytest.mark.parametrize(
    "made",
    [
        *(envelope({"retain_s": 5}, version=version) for version in ("2.0", 1, None)),
        *(envelope(payload) for payload in ([1], None, "store")),
        *(envelope({"retain_s": 5}, kind=kind) for kind in (10**4_000, None)),
        *(5, "x", [], {}, {"actions": 5}, {"actions": [None]}, {"actions": ({"action_type": "kvtier.hints"},)}),
        {"actions": [*OTHERS, *OTHERS]},
    ],
)
def test_an_envelope_that_cannot_be_read_in_full_opts_out(made):
    asked = request({"priority": "high", "session": "s", "kv_hint": made, "max_load_tokens": 7})
    hints, (problem,) = request_hints(asked)
    assert hints == RequestHints(max_load_tokens=7, max_offload_tokens=0)
    assert problem.text == "kv_hint cannot be read; allowed: up to 64 actions, such as kvtier.hints 1"
    assert len(unknown_hints(asked)) < 1000
    asked.kv_transfer_params, asked.kv_hints = None, made  # type: ignore[attr-defined]
    assert request_hints(asked)[0] == OPTED_OUT


@pytest.mark.parametrize("params", [[], "user", 5, False, [("store", False)]])
def test_parameters_that_are_no_table_opt_out(params):
    hints, (problem,) = request_hints(request(params))
    assert hints == OPTED_OUT
    assert problem.text == f"kv_transfer_params is of type {type(params).__name__}; allowed: a JSON object"


anything: st.SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.sampled_from([object, 1j]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3) | st.tuples(inner),
    max_leaves=5,
)
counts = st.none() | st.integers(min_value=1)


@given(said=st.lists(anything | st.just(value=True), min_size=1, max_size=3), most=counts, order=st.permutations("abc"))
def test_no_value_of_store_but_true_leads_to_storing(said, most, order):
    places = {"a": {"store": said[0]}, "b": {}, "c": {}}
    places |= {place: {"store": value} for place, value in zip("bc", said[1:], strict=False)}
    first, second, third = (places[name] for name in order)
    made = request({**first, "max_offload_tokens": most, "session": "s", "kv_hint": envelope(second)})
    made.kv_hints = as_struct(envelope(third))  # type: ignore[attr-defined]
    is_stored = all(value is True for value in said)
    assert request_hints(made)[0].opt_out is opts_out(made) is not is_stored
    assert request_hints(made)[0].conversation is None or is_stored


@given(value=anything | st.integers(), is_in_an_envelope=st.booleans())
def test_a_limit_of_what_is_stored_that_cannot_be_read_opts_out(value, is_in_an_envelope):
    fields = {"max_offload_tokens": value, "store": True}
    hints = request_hints(request({"kv_hint": envelope(fields)} if is_in_an_envelope else fields))[0]
    is_valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    assert hints.max_offload_tokens == (None if value is None else value if is_valid else 0)


@pytest.mark.parametrize("make", [deep, Unprintable, lambda: 10**10_000, lambda: "secret" * 1000, lambda: None])
def test_the_text_about_a_request_that_opts_out_shows_nothing_of_it(make):
    made = make()
    hints, problems = request_hints(request({"session": made, "store": made, "priority": "secret"}, salt="secret"))
    assert hints == OPTED_OUT
    texts = {problem.field: problem.text for problem in problems}
    assert texts["store"] == f"store is of type {type(made).__name__}; allowed: true, false"
    assert "secret" not in "".join(texts.values())


@pytest.mark.parametrize("end", ["", "-0123abcd"])
def test_the_requests_of_a_beam_search_opt_out_because_vllm_passes_no_hints_on(end):
    made = request()
    made.request_id = f"cmpl-a-beam-3-0-4567-beam-12{end}"
    assert request_hints(made)[0] == OPTED_OUT
    made.kv_transfer_params = {"store": True}
    assert request_hints(made)[0] == NO_HINTS
    for other in ("beam-1", "cmpl-beam-1-0-0123abcd", "a-beam-x"):
        made.request_id, made.kv_transfer_params = other, None
        assert request_hints(made)[0] == NO_HINTS


def test_a_request_that_raises_opts_out():
    class Raising(dict[str, object]):
        def __contains__(self, _: object) -> bool:
            raise RuntimeError("planted")

    assert opts_out(request(Raising()))
    assert not opts_out(request({}))


def asked_twice(engine: SmallEngine, tokens: int = 1000, **params: object) -> int:
    """Ask for a prompt, with `params` both times; returns the tokens that the second request loaded."""
    prompt = [engine.draw.randrange(1000) for _ in range(tokens)]
    for _ in range(2):
        engine.ask(prompt, 1, kv_transfer_params=params)
        engine.settle()
        engine.forget()
    return engine.loaded_tokens


@pytest.mark.parametrize(
    ("params", "loaded"),
    [
        ({}, 768),
        ({"store": False}, 0),
        ({"load": False}, 0),
        ({"max_offload_tokens": 600}, 512),
        *(({"max_load_tokens": most}, most // 256 * 256) for most in (1, 255, 256, 257, 300)),
        ({"max_offload_tokens": 0}, 0),
        ({"store": True, "load": True}, 768),
        ({"store": True, "load": 0}, 768),
        *(({"store": value}, 0) for value in ("no", 0, None, 1, "true")),
    ],
)
def test_a_request_limits_what_is_stored_and_loaded(start, params, loaded):
    assert asked_twice(start(), **params) == loaded


@pytest.mark.parametrize("way", WAYS[:2])
def test_nothing_of_a_request_that_opts_out_is_stored_though_it_is_preempted_or_resumed(start, monkeypatch, way):
    engine = start(seed=2, **RUSH, **way)
    stored, preempted = set[str](), set[str]()
    begin, preempt = engine.scheduler._stores.begin, engine._preempt
    monkeypatch.setattr(engine.scheduler._stores, "begin", lambda name, *it: (stored.add(name), begin(name, *it)))
    monkeypatch.setattr(engine, "_preempt", lambda it: (preempted.add(it.request_id), preempt(it)))
    prompts = [[engine.draw.randrange(1000) for _ in range(600)] for _ in range(4)]
    asked = [
        engine.add(prompt, 60, kv_transfer_params={"store": number % 2 == 1, "session": "s", "priority": "high"})
        for number, prompt in enumerate(prompts)
    ]
    engine.run()
    assert stored == {it.request_id for it in asked[1::2]}
    assert preempted & {it.request_id for it in asked[::2]}
    # Another request with the same tokens stores them as its own, also what vLLM's own cache has of the first one.
    engine.forget()
    engine.ask(prompts[0], 1, kv_transfer_params={"store": False})
    again = engine.ask([*prompts[0], *prompts[2][:300]], 1)
    assert stored == {it.request_id for it in (*asked[1::2], again)}
    engine.settle()
    chain = engine.scheduler._keys.begin(again)
    chain.extend(again.tokens)
    assert engine.opened.session.host_tokens(chain.prefix()) == 768


def test_what_may_not_be_loaded_may_be_stored(start):
    engine = start()
    prompt = [engine.draw.randrange(1000) for _ in range(1000)]
    for params, loaded in (({"load": False}, 0), ({"load": False}, 0), ({}, 768)):
        engine.ask(prompt, 1, kv_transfer_params=params)
        engine.settle()
        engine.forget()
        assert engine.loaded_tokens == loaded


@pytest.mark.parametrize("retain_s", [None, 600])
def test_a_retained_prompt_survives_others(start, retain_s):
    engine = start(
        config=Config(host=HostConfig(capacity_bytes="4MiB", evictor="lru"), limits=LimitsConfig(hint_percent=50))
    )
    prompt = [engine.draw.randrange(1000) for _ in range(600)]
    engine.ask(prompt, 1, kv_transfer_params={"retain_s": retain_s})
    engine.settle()
    if retain_s is not None:  # two chunks
        chunk_bytes = frame_bytes(engine.geometry.layout.groups[0])
        wait_until(lambda: engine.opened.metrics.get(RETAINED_BYTES) == 2 * chunk_bytes, "the gauge")
    for _ in range(40):
        engine.settle()
        engine.forget()
        engine.ask([engine.draw.randrange(1000) for _ in range(600)], 1)
    engine.settle()
    engine.forget()
    before = engine.loaded_tokens
    engine.ask(prompt, 1)
    assert engine.loaded_tokens - before == (0 if retain_s is None else 512)


def test_what_one_request_may_not_retain_is_counted_and_named_once(start, caplog):
    engine = start(config=Config(host=HostConfig(capacity_bytes="4MiB")))
    for number in (1, 2):
        engine.ask([number] * 600, 1, kv_transfer_params={"retain_s": 600})
        engine.settle()
        counted = partial(engine.opened.metrics.get, REFUSED_HINTS, reason="retained")
        wait_until(lambda: counted() == number, "the counter")  # noqa: B023 - it is called at once
    assert caplog.text.count("limits.hint_percent or retained_percent: the rest is not retained") == 1
    assert engine.opened.metrics.get(REFUSED_HINTS, reason="prefetches") == 0


@pytest.mark.parametrize("is_allowed", [True, False])
@pytest.mark.parametrize("in_envelope", [True, False])
def test_a_high_priority_counts_only_where_the_settings_allow_it(start, caplog, is_allowed, in_envelope):
    engine = start(params={"allows_high_priority": is_allowed})
    said = {"kv_hint": envelope({"priority": "high"})} if in_envelope else {"priority": "high"}
    for _ in range(2):
        engine.ask([1] * 600, 1, kv_transfer_params=said)
        engine.ask([2] * 600, 1, kv_transfer_params={"retain_s": 600})
    engine.settle()
    retention = engine.opened.session._cache.hints.retention
    wait_until(lambda: sum(retention.counts), "the hints count")
    ends = [len(by_age[Priority.HIGH]) for by_age in retention._by_age]
    assert any(ends) is is_allowed
    assert all(by_age[Priority.NORMAL] for by_age in retention._by_age), "the control: another hint counts"
    assert engine.opened.metrics.get(REFUSED_HINTS, reason="priority") == (0 if is_allowed else 2)
    assert caplog.text.count("priority = 'high'; allowed: 'low', 'normal'; with vllm.allow_high_priority") == (
        not is_allowed
    )


def test_a_reset_ends_all_hints(start, monkeypatch):
    engine = start()
    ended: list[bool] = []
    monkeypatch.setattr(engine.scheduler._session, "forget_hints", lambda: ended.append(True))
    engine.ask([1] * 600, 1, kv_transfer_params={"retain_s": 600})
    assert engine.scheduler.invalidation.reset()
    assert ended == [True]


class Heard(Lru):
    """An evictor that records conversations and hints."""

    owners: ClassVar[list[str | None]] = []
    said: ClassVar[list[tuple[str, NextTurn | None]]] = []

    def added(self, use: Use) -> None:
        self.owners.append(use.conversation)
        super().added(use)

    touched = added

    def expects(self, conversation, next_turn) -> None:
        self.said.append((conversation, next_turn))


def test_an_engine_passes_on_the_session_of_its_chunks_and_the_next_turn(start, monkeypatch):
    monkeypatch.setitem(EVICTORS, "heard", (__name__, "Heard"))
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
    assert foreign.startswith(
        f"request {names[1]}: kv_transfer_params has the unknown fields ['nextturn', 'remote_block_ids']; known: "
    )
    assert wrong.startswith(f"request {names[3]}: next_turn = 'sometime'; allowed")
