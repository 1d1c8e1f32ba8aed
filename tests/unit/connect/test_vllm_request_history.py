"""Each decision about a request gives its reason, and clearing while requests run leaves nothing behind."""

from types import SimpleNamespace

import pytest
from tests.vllm_engine import SmallEngine
from tests.waiting import wait_until

from kvtier.connect.vllm.requests.account import RequestAccount
from kvtier.connect.vllm.requests.miss_reasons import RequestHistory, RequestRecord, reasons_of
from kvtier.keys.chain import Chain, Extra
from kvtier.runtime.control_socket import ControlError
from kvtier.runtime.observers.journal import Planned
from kvtier.types import ChunkKey, LoadDone, RequestId

SIZE = 256
KEYS = tuple(ChunkKey(bytes([number])) for number in range(5))


def record(account: RequestAccount | None = None, name: str = "r", **given: object) -> RequestRecord:
    """A request of 1400 tokens that ended at 100 s."""
    fields = {"ended_s": 100.0, "prompt_tokens": 1400, "most_tokens": 1280, "skips": False}
    fields |= {"number": 0, "max_load_tokens": None, "keys": KEYS, "prompt": [], "account": account or RequestAccount()}
    fields |= given
    return RequestRecord(name, **fields)


def codes(one: RequestRecord, *others: RequestRecord) -> list[str]:
    return [reason.code for reason in reasons_of(one, list(others), SIZE, 110.0)]


def planned(chosen: int, expected_s: float, best_s: float | None) -> Planned:
    return Planned(chosen, expected_s, expected_s, best_s, 0.0, "", is_trial=False)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (record(keys=None), ["not_cached"]),
        (record(RequestAccount(refusal="it is a pooling request"), keys=None), ["not_cached"]),
        (record(skips=True), ["skipped"]),
        (record(most_tokens=0, prompt_tokens=200), ["no_chunk"]),
        (record(RequestAccount(resident_tokens=1392)), ["engine", "complete"]),
        (record(max_load_tokens=0), ["hint", "complete"]),
        (record(RequestAccount(resident_tokens=300), max_load_tokens=300), ["engine", "hint", "no_lookup"]),
        (record(), ["no_lookup"]),
        (record(RequestAccount(obstacles=("rank 1 is lost",))), ["obstacle", "absent", "shared"]),
        (record(RequestAccount(planned=planned(0, 1.0, None))), ["absent", "shared"]),
        (
            record(RequestAccount(planned=planned(0, 1.0, None), announced_tokens=512)),
            ["absent", "announced", "shared"],
        ),
        (record(RequestAccount(found=(("disk", 1280),), planned=planned(0, 1.0, 2.0))), ["planner"]),
        (
            record(RequestAccount(found=(("disk", 512),), planned=planned(256, 1.0, 2.0))),
            ["absent", "shared", "planner"],
        ),
    ],
)
def test_the_reasons_follow_the_decisions(one, expected):
    assert codes(one) == expected


def test_a_planner_that_distrusts_a_place_says_so():
    for best_s, is_named in ((2.0, False), (0.5, True)):
        one = record(RequestAccount(found=(("disk", 1280),), planned=planned(0, 1.0, best_s)))
        (reason,) = reasons_of(one, [], SIZE, 110.0)
        assert ("have cost time" in reason.text) is is_named
        assert f"the best other choice takes {best_s:g} s" in reason.text


def test_an_earlier_request_with_the_chunk_proves_a_removal_and_a_later_one_does_not():
    one = record(RequestAccount(found=(("disk", 512),), planned=planned(512, 1.0, None)))
    stored, nothing = RequestAccount(stored_tokens=1280), RequestAccount()
    assert codes(one, record(stored, "before", ended_s=90.0)) == ["absent", "removed"]
    assert codes(one, record(stored, "after", ended_s=101.0)) == ["absent", "shared"]
    (_, reason) = reasons_of(one, [record(nothing, "before", ended_s=90.0)], SIZE, 110.0)
    assert reason.text == "request before, which ended 20 s ago, had the chunk; that request stored nothing"
    other = record(stored, "other", ended_s=90.0, keys=KEYS[:1])
    assert reasons_of(one, [other], SIZE, 110.0)[1].text.endswith("requests has 256 tokens (request other)")


def test_a_load_that_was_cut_or_failed_is_named():
    for was_cut, code in ((True, "cut"), (False, "failed")):
        account = RequestAccount(found=(("disk", 1280),), planned=planned(1280, 1.0, None))
        account.load_ended(LoadDone(RequestId("l"), 256, 1280, ((0, 1),), was_cut=was_cut), 0.5, [], ())
        assert codes(record(account)) == [code]


def test_the_history_is_bounded_and_takes_both_ids():
    session = SimpleNamespace(obstacle="", tier_faults=dict, survey=lambda *_: None)
    history = RequestHistory(
        session, SimpleNamespace(chunk_tokens=SIZE, hit_tokens=lambda tokens: tokens), lambda: "no"
    )
    for number in range(300):
        name = f"chatcmpl-c{number}-0a1b2c3d"
        request = SimpleNamespace(request_id=name, num_prompt_tokens=9, skip_reading_prefix_cache=False)
        tracked = SimpleNamespace(id=name, number=number, request=request, keys=None, account=RequestAccount())
        tracked.announced_tokens = 0
        tracked.hints = SimpleNamespace(max_load_tokens=None)
        history.arrived(tracked, "vLLM sleeps" if number == 299 else "")
        if number == 299:
            assert history.why("c299")["ended_ago_s"] is None
        history.ended(tracked)
    assert history.why("c298")["reasons"] == [{"code": "not_cached", "text": "no"}]
    assert history.why("chatcmpl-c299-0a1b2c3d")["reasons"] == [{"code": "not_cached", "text": "vLLM sleeps"}]
    with pytest.raises(ControlError, match=r"request 'c1' is unknown; the last 256 ended requests and 0 open ones"):
        history.why("c1")


def test_a_request_that_arrives_while_kvtier_is_off_is_explained_by_what_stops_it_and_later_by_its_load():
    engine = SmallEngine(remembers=True)
    invalidation = engine.scheduler.invalidation

    def reasons(name: str) -> list[dict[str, str]]:
        return engine.history.why(name)["reasons"]

    try:
        prompt = [engine.draw.randrange(1000) for _ in range(1000)]
        engine.ask(prompt, 1)
        engine.settle()
        engine.forget()
        invalidation.stop("vLLM sleeps")
        request = engine.add(prompt, 1)
        assert reasons(request.request_id) == [{"code": "not_cached", "text": "vLLM sleeps"}]
        invalidation.go_on(has_own_keys=False, cleared_salts=())
        engine.run()
        assert engine.loaded_tokens == 768
        assert [it["code"] for it in reasons(request.request_id)] == ["complete"]
        invalidation.stop("vLLM sleeps")
        invalidation.weights_change("apply_model()")
        request = engine.add(prompt, 1)
        (reason,) = reasons(request.request_id)
        assert "the weights have changed" in reason["text"]
    finally:
        engine.close()


@pytest.mark.parametrize("salt", [None, "", "a"])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_clearing_while_requests_run_finds_nothing_from_before_and_leaves_nothing_behind(salt, is_overlapped):
    """`LieError` of the engine would show bytes of other tokens."""
    engine = SmallEngine(seed=3, is_overlapped=is_overlapped, slow_s=0.004)
    epochs = {"": 0, "a": 0}

    def keys(request) -> Chain:
        own = request.cache_salt or ""
        return Chain(bytes(32), engine.geometry.chunk_tokens, [Extra("salt", f"{own} {epochs[own]}".encode())])

    engine.scheduler._keys.begin = keys
    try:
        prompts = [[engine.draw.randrange(1000) for _ in range(700)] for _ in range(3)]
        for round_ in range(6):
            for number, prompt in enumerate(prompts):
                engine.add(prompt, 8, cache_salt="a" if number % 2 else None)
                engine.step()
            for own in epochs if salt is None else [salt]:
                epochs[own] += 1
            engine.scheduler.invalidation.clear(salt)
            engine.run()
            if round_ % 2:
                engine.forget()
        for _ in range(2):  # filled again, and found
            before = engine.loaded_tokens
            for number, prompt in enumerate(prompts):
                engine.add(prompt, 1, cache_salt="a" if number % 2 else None)
                engine.run()
            engine.idle()
            engine.forget()
        assert engine.loaded_tokens - before == 3 * 512
        before, loaded = engine.loaded_tokens, 512
        for prompt in prompts:  # these have arrived, and are not looked up yet
            engine.add(prompt, 1, cache_salt="a" if prompt is prompts[1] else None)
        for own in epochs if salt is None else [salt]:
            epochs[own] += 1
        engine.scheduler.invalidation.clear(salt)
        engine.run()
        assert engine.loaded_tokens - before == {None: 0, "": loaded, "a": 2 * loaded}[salt]
        wait_until(lambda: not engine.opened.session._cache.in_flight, "rest")
    finally:
        engine.close()


def test_a_salt_that_is_cleared_ends_the_hints_before_it_and_no_pin_after_it():
    engine = SmallEngine()
    try:
        prompt = [engine.draw.randrange(1000) for _ in range(1000)]
        keys = Chain(bytes(32), engine.geometry.chunk_tokens)
        keys.extend(prompt)
        prefix, session = keys.prefix(), engine.opened.session
        engine.ask(prompt, 1)
        engine.settle()
        session.retain(prefix, 500.0)
        assert session.host_tokens(prefix, is_retained=True) == 768
        engine.scheduler.invalidation.clear("other")
        assert session.host_tokens(prefix, is_retained=True) == 0
        session.retain(prefix, 500.0)
        assert engine.scheduler.has_news, "the engine is idle: it has not taken a step since"
        engine.run()
        assert session.host_tokens(prefix, is_retained=True) == 768
    finally:
        engine.close()
