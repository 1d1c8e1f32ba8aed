"""Prefill here, decode there: what an engine announces, what it makes of an announcement, and what it never stores."""

import pytest
from tests.vllm_engine import SmallEngine
from tests.vllm_engine_parts import Request

from kvtier.connect.vllm.requests.transfer_params import (
    Announces,
    announced_tokens,
    announcement_of,
    wants_announcement,
)
from kvtier.types import StoreDone

PROMPT = list(range(1000))
WHOLE = 768
ALWAYS, NEVER = {"announces": Announces.ALWAYS}, {"announces": Announces.NEVER}


def asked(params: object, tokens: int = 1000) -> Request:
    made = Request("r", [1] * tokens, tokens, tokens + 1)
    made.kv_transfer_params = params  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("tokens", [0, 1, 768])
def test_an_announcement_arrives_as_it_was_made(tokens):
    assert announced_tokens(asked(announcement_of(tokens))) == (tokens, "")


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {"kvtier": None}, [1], "kvtier", 5])
def test_a_request_without_one_has_none(params):
    assert announced_tokens(asked(params)) == (0, "")
    assert not wants_announcement(asked(params))


def test_more_tokens_than_the_request_has_are_not_announced():
    assert announced_tokens(asked({"kvtier": {"tokens": 10**30}})) == (1000, "")


@pytest.mark.parametrize("tokens", [-1, True, 1.5, "768", None, [], {}, float("nan"), [[[]]]])
@pytest.mark.parametrize("is_bare", [False, True])
def test_an_announcement_of_another_type_is_ignored_and_named(tokens, is_bare):
    if is_bare and tokens in (None, {}):
        pytest.skip("no announcement, and one without tokens")
    found, problem = announced_tokens(asked({"kvtier": tokens if is_bare else {"tokens": tokens}}))
    assert found == 0
    assert problem.startswith("kvtier.tokens = ")
    assert problem.endswith("allowed: a number of tokens, as the prefill engine announced it")


def run(engine: SmallEngine, **said: object) -> object:
    request = engine.ask(PROMPT, 1, **said)
    engine.forget()
    return engine.announced[request.request_id]


def test_a_prefill_engine_announces_the_whole_chunks_of_the_prompt(start):
    engine = start(params=ALWAYS)
    wanted = {"do_remote_prefill": True, "do_remote_decode": False, "kvtier": {"tokens": WHOLE}}
    assert run(engine) == wanted
    assert run(engine) == wanted, "what it loaded is there, too"


def test_any_other_engine_announces_when_a_request_wants_it(start):
    engine = start()
    assert run(engine) is None
    assert run(engine, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False}) == announcement_of(
        WHOLE
    )
    assert run(engine, kv_transfer_params={"do_remote_decode": "yes"}) is None


def test_an_engine_whose_stores_no_other_engine_finds_announces_nothing(start):
    engine = start(params=NEVER)
    assert run(engine) is None
    assert run(engine, kv_transfer_params={"do_remote_decode": True}) is None


def test_beside_another_connector_requests_are_handed_over_by_the_other(start):
    """vLLM's `MultiConnector` refuses responses in which two connectors name the same field."""
    engine = start(params={"announces": Announces.ALWAYS, "is_alone": False})
    assert run(engine, kv_transfer_params={"do_remote_decode": True, "remote_port": 5}) is None
    request = engine.add(PROMPT, 1, kv_transfer_params=announcement_of(WHOLE))
    assert engine.scheduler.requests[request.request_id].announced_tokens == 0
    engine.run()
    assert engine.loaded_tokens == 0, "the other loads"
    engine.forget()
    run(engine, kv_transfer_params={"do_remote_prefill": False})
    assert engine.loaded_tokens == WHOLE, "the other has no more to load"


@pytest.mark.parametrize("said", [{"store": False}, {"max_offload_tokens": 0}, {"store": "no"}, {"store": True}])
@pytest.mark.parametrize(
    "fields", [{"params": ALWAYS}, {"params": NEVER}, {"params": {"is_alone": False}}, {"stores": False}]
)
def test_the_decode_engine_hears_that_a_request_opts_out(start, said, fields):
    """A proxy passes on what the response says, and perhaps nothing that the client has said."""
    prefill, decode = start(**fields), start(seed=1)
    passed_on = run(prefill, kv_transfer_params={"do_remote_decode": True, **said})
    assert (passed_on == {"store": False}) == (said != {"store": True})
    for hints in (passed_on, None):
        decode.ask(PROMPT, 1, kv_transfer_params=hints)
        decode.settle()
        decode.forget()
    assert decode.loaded_tokens == (WHOLE if said == {"store": True} else 0)
    assert run(start(), kv_transfer_params=said) is None


LOSSY = {"loss": "int4"}


def test_a_response_of_a_lossy_class_has_the_class_and_the_loaded_tokens(start):
    """In an exact engine, responses stay as they are: see the tests above."""
    engine = start(params=LOSSY)
    assert run(engine) == {"kvtier": {"loss": "int4", "loaded_tokens": 0}}
    assert run(engine) == {"kvtier": {"loss": "int4", "loaded_tokens": WHOLE}}
    assert run(engine, kv_transfer_params={"store": False})["kvtier"]["loaded_tokens"] == WHOLE
    assert run(engine, cache_salt="exact:one")["kvtier"]["loss"] == "none", "this engine's keys know no salts"


def test_a_proxy_may_pass_on_what_a_lossy_class_says(start):
    said = run(start(params=LOSSY), kv_transfer_params={"do_remote_decode": True})
    assert announced_tokens(asked(said)) == (WHOLE, "")
    assert said["kvtier"] == {"tokens": WHOLE, "loss": "int4", "loaded_tokens": 0}
    opted_out = run(start(params=LOSSY), kv_transfer_params={"do_remote_decode": True, "store": False})
    assert opted_out == {"store": False, "kvtier": {"loss": "int4", "loaded_tokens": 0}}
    assert announced_tokens(asked(opted_out)) == (0, "")


def test_a_cache_reset_ends_announcements_because_other_engines_have_other_keys(start):
    engine = start(params=ALWAYS)
    assert run(engine) is not None
    waits = [engine.add(PROMPT, 1, kv_transfer_params=announcement_of(WHOLE))]
    engine.scheduler.invalidation.reset()
    waits.append(engine.add(PROMPT, 1, kv_transfer_params=announcement_of(WHOLE)))
    assert [engine.scheduler.requests[it.request_id].announced_tokens for it in waits] == [0, 0]
    engine.run()
    assert [engine.announced[it.request_id] for it in waits] == [None, None]


def test_generated_tokens_are_not_announced(start):
    engine = start(params=ALWAYS)
    request = engine.ask(PROMPT, 600)
    assert engine.announced[request.request_id] == announcement_of(1000), "some chunk ends past the prompt"


def test_a_request_that_is_aborted_announces_what_was_stored_until_then(start):
    engine = start(params=ALWAYS, step_tokens=256)
    request = engine.add(PROMPT, 1)
    for _ in range(2):
        engine.step()
    engine.abort(request)
    engine.run()
    assert engine.announced[request.request_id]["kvtier"]["tokens"] in (256, 512)


def test_stores_of_a_request_that_has_gone_go_on(start):
    engine = start(params=ALWAYS, rest=0.0)  # no copy is made before `settle`
    request = engine.add(PROMPT, 1)
    while request.request_id in engine.requests:
        engine.step()
    assert engine.announced[request.request_id] == announcement_of(WHOLE)
    assert not engine.opened.session._cache.host.readable[0], "nothing has left the engine's blocks yet"
    engine.settle()
    done = [it for it in engine.scheduler._loads.take_events() if isinstance(it, StoreDone)]
    assert [(it.stored, it.dropped) for it in done] == [(WHOLE // 256, 0)]


def test_a_decode_engine_loads_and_stores_nothing(start):
    events = []
    engine = start(stores=False)
    take = engine.scheduler._loads.take_events
    engine.scheduler._loads.take_events = lambda: [events.append(it) or it for it in take()]
    assert run(engine, kv_transfer_params=announcement_of(WHOLE)) is None
    assert not engine.loaded_tokens
    assert not [it for it in events if isinstance(it, StoreDone)]
    prefix = Request("other", PROMPT, 1000, 1001)
    control = start()
    control.ask(prefix.tokens, 1)
    control.forget()
    run(control)
    assert control.loaded_tokens == WHOLE, "the control: an engine that stores"


def test_a_load_that_ends_early_ends_the_wait_for_announced_chunks(start):
    engine = start()
    run(engine)
    tracked = []
    for failing in (0.0, 1.0):
        engine.copier.failing = failing
        request = engine.add(PROMPT, 1, kv_transfer_params=announcement_of(WHOLE))
        tracked.append(engine.scheduler.requests[request.request_id])
        engine.run()
        engine.forget()
    assert [it.announced_tokens for it in tracked] == [WHOLE, 0]
