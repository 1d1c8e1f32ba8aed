"""The calls of the control socket on a session with all real parts: what they find, clear and say of its health."""

import json
import math
import threading
import time

import numpy as np
import pytest
from tests.memory_tier import GatedTier, MemoryTier
from tests.rig import CHUNK_TOKENS, Engine, local, looked_up, places_of, prefix_of, stored
from tests.system import until

from kvtier.core import hint_scheduler
from kvtier.core.tier_searches import Probes
from kvtier.keys.chain import Chain, Extra
from kvtier.runtime import control_socket, locked_core
from kvtier.runtime.control_handlers import Control, EngineCalls
from kvtier.runtime.control_socket import ControlError
from kvtier.types import Presence, Priority, RequestId, StoreDone

ROOT = bytes(32)
ALL = {"host": "all", "fast": "all", "slow": "all"}


class Adapter:
    """What an engine's adapter gives, and the calls."""

    def __init__(self, session) -> None:
        self.cleared, self.problem = [], ""
        calls = EngineCalls(
            chain=lambda salt, _adapter: Chain(ROOT, CHUNK_TOKENS, [Extra("salt", salt.encode())] if salt else []),
            hit_tokens=lambda tokens: (tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS,
            clear=self.cleared.append,
            problem=lambda: self.problem,
        )
        self.control = Control(session, calls, 100.0)

    def ask(self, command: str, wait_s: float = 10.0, /, **arguments: object) -> dict:
        result = self.control.answer(command, arguments, time.monotonic() + wait_s)
        assert control_socket._formed(json.loads(json.dumps(result)), control_socket.FORMS[command]) == result
        return result

    def ranges(self, tokens: list[int], wait_s: float = 10.0) -> list[tuple]:
        """(first chunk, end, places) of each range."""
        found = self.ask("find", wait_s, tokens=tokens)["ranges"]
        return [(it["from"] // CHUNK_TOKENS, it["to"] // CHUNK_TOKENS, it["places"]) for it in found]


def tokens_of(chunks: int, seed: int = 0) -> list[int]:
    """The tokens of `prefix_of`."""
    return np.random.default_rng(seed).integers(0, 1000, chunks * CHUNK_TOKENS).tolist()


@pytest.fixture
def slow():
    tier = GatedTier("slow")
    yield tier
    tier.open_again()


@pytest.fixture
def session(slow):
    tiers = {"fast": MemoryTier("fast", capacity_bytes=64 << 20), "slow": slow}
    made, cache, _ = local(Engine(64).copier(), tiers, slots=4, rules={"probe_deadline_s": 3.0, "failures": 1})
    made.core = cache
    yield made
    slow.open_again()
    made.close(5.0)


@pytest.fixture
def adapter(session):
    return Adapter(session)


def settled(session) -> None:
    until(lambda: not session.core.in_flight and not session.core.pending_count)


def test_find_names_every_place_of_every_chunk(session, adapter):
    tokens = tokens_of(6)
    assert adapter.ranges(tokens) == [(0, 6, {})]
    assert adapter.ask("find", tokens=tokens)["end"] == "nothing holds the chunk at token 0"
    assert stored(session, "a", prefix_of(3), places_of(range(3))) == StoreDone("a", stored=6, dropped=0)
    settled(session)
    assert adapter.ranges(tokens) == [(0, 3, ALL), (3, 6, {})]
    found = adapter.ask("find", tokens=tokens)
    assert found["hit_tokens"] == 3 * CHUNK_TOKENS
    assert found["end"] == f"nothing holds the chunk at token {3 * CHUNK_TOKENS}"
    stored(session, "b", prefix_of(4, seed=1), places_of(range(4)))
    settled(session)
    assert adapter.ranges(tokens)[0] == (0, 3, {"fast": "all", "slow": "all"}), "the second store has evicted them"
    assert adapter.ask("find", tokens=tokens)["hit_tokens"] == 3 * CHUNK_TOKENS
    assert looked_up(session, "q", prefix_of(3)).tokens == 3 * CHUNK_TOKENS


def test_find_ends_at_the_last_token_and_at_a_missing_window(session, adapter):
    stored(session, "a", prefix_of(3), places_of(range(3), (0,)) + places_of([0], (1,)))
    found = adapter.ask("find", tokens=tokens_of(3))
    assert (found["hit_tokens"], found["end"]) == (
        CHUNK_TOKENS,
        "no later boundary at which the model's windows or states can resume is stored",
    )
    assert adapter.ask("find", tokens=tokens_of(1))["hit_tokens"] == 0, "the last token is computed"
    assert adapter.ask("find", tokens=tokens_of(1))["end"].startswith("the prompt ends")
    assert adapter.ask("find", tokens=[1])["end"] == f"the prompt has no full chunk; a chunk has {CHUNK_TOKENS} tokens"
    assert adapter.ask("find", tokens=tokens_of(3), salt="other")["hit_tokens"] == 0
    # The window at the end of the prompt is there; a request stops a chunk before, where it is not.
    stored(session, "b", prefix_of(3, seed=1), places_of(range(3), (0,)) + places_of([1, 2], (1,)))
    assert looked_up(session, "q", prefix_of(2, seed=1)).tokens == 0
    assert adapter.ask("find", tokens=tokens_of(3, seed=1))["hit_tokens"] == 0
    assert adapter.ask("find", tokens=[*tokens_of(3, seed=1), 1])["hit_tokens"] == 3 * CHUNK_TOKENS


def test_a_tier_that_hangs_costs_find_its_deadline_and_is_named(session, adapter, slow):
    stored(session, "a", prefix_of(3), places_of(range(3)))
    settled(session)
    slow.shut.add("contains")
    began_s = time.monotonic()
    found = adapter.ask("find", 0.3, tokens=tokens_of(3))
    assert time.monotonic() - began_s < 5.0
    assert found["silent"] == {"slow": "did not answer in time"}
    assert found["ranges"][0]["places"] == {"host": "all", "fast": "all"}
    until(lambda: not session.tier_faults()["slow"].reads)
    found = adapter.ask("find", tokens=tokens_of(3))
    assert (found["silent"], found["hit_tokens"]) == ({"slow": "is down"}, 2 * CHUNK_TOKENS)
    unknown = adapter.ask("find", tokens=tokens_of(3, seed=9))
    assert unknown["end"] == "nothing holds the chunk at token 0; tier slow is down"


def test_a_tier_that_fails_is_named_with_its_last_fault(session, adapter, slow):
    assert adapter.ask("health")["tiers"]["slow"] == {"reads": True, "writes": True, "detail": ""}
    slow.broken.add("contains")
    silent = adapter.ask("find", tokens=tokens_of(1))["silent"]
    assert silent in ({"slow": "did not answer"}, {"slow": "is down"}), "a health check may have come first"
    health = adapter.ask("health")
    assert (health["live"], health["ready"], health["problem"]) == (True, True, "")
    assert not health["tiers"]["slow"]["reads"]
    assert "reads failed 1 times in a row" in health["tiers"]["slow"]["detail"]
    assert "no contains" in health["tiers"]["slow"]["detail"]
    slow.open_again()
    until(lambda: adapter.ask("health")["tiers"]["slow"]["reads"])
    assert adapter.ask("health")["tiers"]["slow"]["detail"] == ""


def test_clear_all_frees_host_memory_and_the_adapter_changes_its_keys(session, adapter):
    stored(session, "a", prefix_of(3), places_of(range(3)))
    settled(session)
    answer = adapter.ask("clear", all=True)
    assert (answer["freed_objects"], answer["kept_objects"], adapter.cleared) == (6, 0, [None])
    assert "objects in fast, slow are kept" in answer["notes"][0]
    session.core.check()
    assert adapter.ranges(tokens_of(3)) == [(0, 3, {"fast": "all", "slow": "all"})]
    assert stored(session, "b", prefix_of(4, seed=1), places_of(range(4))).stored == 8
    adapter.ask("clear", salt="one")
    adapter.ask("clear", salt="")
    assert adapter.cleared == [None, "one", ""]
    assert looked_up(session, "q", prefix_of(4, seed=1)).presence is Presence.READY


def test_clear_keeps_what_is_on_its_way(session, adapter, slow):
    slow.shut.add("write")
    stored(session, "a", prefix_of(2), places_of(range(2)))
    until(slow.hangs.is_set)
    answer = adapter.ask("clear", all=True)
    assert answer["freed_objects"] + answer["kept_objects"] == 4
    assert answer["kept_objects"] > 0
    session.core.check()
    slow.open_again()
    settled(session)
    assert adapter.ask("clear", all=True)["kept_objects"] == 0


def test_a_prefetch_waits_for_what_lower_tiers_hold_and_a_pin_survives_pressure(session, adapter):
    first, others = tokens_of(2), [tokens_of(3, seed=seed) for seed in (1, 2, 3)]
    assert adapter.ask("prefetch", tokens=first) == {"tokens": 32, "stored_tokens": 0, "host_tokens": 0}
    stored(session, "a", prefix_of(2), places_of(range(2)))
    for seed in (1, 2):
        settled(session)
        stored(session, f"b{seed}", prefix_of(3, seed=seed), places_of(range(3)))
    settled(session)
    assert "host" not in adapter.ranges(first)[0][2]
    assert adapter.ask("prefetch", tokens=first) == {"tokens": 32, "stored_tokens": 32, "host_tokens": 32}
    pinned = adapter.ask("pin", tokens=first, seconds=50)
    assert (pinned["pinned_tokens"], pinned["host_tokens"]) == (32, 32)
    for seed in (3, 4):
        settled(session)
        stored(session, f"c{seed}", prefix_of(3, seed=seed), places_of(range(3)))
    assert "host" in adapter.ranges(first)[0][2]
    session.core.check()
    assert adapter.ask("unpin", tokens=first)["unpinned_tokens"] == 32
    assert adapter.ask("unpin", tokens=first)["unpinned_tokens"] == 0
    for seed in (5, 6):
        settled(session)
        stored(session, f"d{seed}", prefix_of(3, seed=seed), places_of(range(3)))
    assert "host" not in adapter.ranges(first)[0][2], "no longer kept"
    assert adapter.ask("pin", tokens=others[0], seconds=50)["pinned_tokens"] <= 2 * CHUNK_TOKENS, "half of four slots"
    adapter.ask("clear", all=True)
    assert adapter.ask("unpin", tokens=others[0])["unpinned_tokens"] == 0


def test_no_client_keeps_the_operator_or_others_from_host_memory(session, adapter, caplog):
    """It gives more hints than there are places, due as late as possible, and retains what it can, with priority."""
    victim = prefix_of(2, seed=7)
    for seed in (7, 1, 2):
        stored(session, f"s{seed}", prefix_of(2, seed=seed), places_of(range(2)))
        settled(session)
    for number in range(hint_scheduler.PREFETCHES_MAX + 9):
        session.prefetch(RequestId(f"p{number}"), prefix_of(1, seed=1000 + number), 3600.0, "attacker")
    session.retain(prefix_of(2, seed=2), math.inf, Priority.HIGH)
    assert session.host_tokens(prefix_of(2, seed=2), is_retained=True) == 32
    assert session.host_tokens(victim) == 0
    session.prefetch(RequestId("victim"), victim, 0.0, "victim")
    until(lambda: session.host_tokens(victim) == 32)
    others = tokens_of(2, seed=1)
    assert adapter.ask("pin", tokens=others, seconds=50)["pinned_tokens"] == 32
    session.retain(prefix_of(2, seed=2), math.inf, Priority.HIGH)
    stored(session, "s8", prefix_of(2, seed=8), places_of(range(2)))
    assert adapter.ask("unpin", tokens=others)["unpinned_tokens"] == 32
    session.core.check()
    refused = dict(session.core.counters.refused_hints)
    refused.pop("waiting", None)  # on a busy machine more hints wait for the session's next tick than may
    assert refused == {"prefetches": 10, "retained": 2}, "the victim, then the high one"
    for text in ("256 prefetches are open", "limits.hint_percent"):
        until(lambda text=text: caplog.text.count(text) == 1)


@pytest.mark.parametrize(("command", "more"), [("prefetch", {}), ("pin", {"seconds": 5})])
def test_nothing_is_brought_to_host_memory_while_the_adapter_loads_nothing(session, adapter, command, more):
    stored(session, "a", prefix_of(2), places_of(range(2)))
    settled(session)
    assert session.emptied(lambda: None, 5.0)
    adapter.problem = "vLLM sleeps"
    with pytest.raises(ControlError, match="nothing is loaded into host memory: vLLM sleeps"):
        adapter.ask(command, tokens=tokens_of(2), **more)
    adapter.problem = ""
    # A call that has begun before, and a hint, come too late.
    assert adapter.ask(command, 0.5, tokens=tokens_of(2), **more)["host_tokens"] == 0
    session.is_lent = False
    assert adapter.ask(command, tokens=tokens_of(2), **more)["host_tokens"] == 32


def test_a_prefetch_that_hangs_ends_at_the_calls_deadline(slow):
    session, cache, _ = local(Engine(64).copier(), {"slow": slow}, slots=4)
    session.core, adapter = cache, Adapter(session)
    stored(session, "a", prefix_of(2), places_of(range(2)))
    settled(session)
    adapter.ask("clear", all=True)
    slow.shut.add("read")
    began_s = time.monotonic()
    assert adapter.ask("prefetch", 0.5, tokens=tokens_of(2)) == {"tokens": 32, "stored_tokens": 32, "host_tokens": 0}
    assert time.monotonic() - began_s < 5.0
    slow.open_again()
    session.close(5.0)


def test_a_prefetch_goes_on_until_the_calls_deadline(slow, monkeypatch):
    monkeypatch.setattr(hint_scheduler, "KEEP_S", 0.05)
    session, cache, _ = local(Engine(64).copier(), {"slow": slow}, slots=4)
    session.core, adapter = cache, Adapter(session)
    stored(session, "a", prefix_of(2), places_of(range(2)))
    settled(session)
    adapter.ask("clear", all=True)
    slow.shut.add("read")
    opener = threading.Timer(0.5, slow.open_again)
    opener.start()
    assert adapter.ask("prefetch", tokens=tokens_of(2))["host_tokens"] == 32
    opener.join()
    session.close(5.0)


def test_an_internal_error_shows_in_health_and_in_find(session, adapter, monkeypatch):
    monkeypatch.setattr(Probes, "survey", lambda *_: 1 / 0)
    with pytest.raises(ControlError, match="nothing can be found: an internal error has switched kvtier off: ZeroDiv"):
        adapter.ask("find", tokens=tokens_of(1))
    health = adapter.ask("health")
    assert (health["live"], health["ready"]) == (True, False)
    assert health["problem"] == "an internal error has switched kvtier off: ZeroDivisionError: division by zero"


def test_find_promises_nothing_while_the_adapter_loads_nothing(session, adapter):
    stored(session, "a", prefix_of(3), places_of(range(3)))
    adapter.problem = "rank 1 is lost"
    found = adapter.ask("find", tokens=[*tokens_of(3), 1])
    assert (found["hit_tokens"], found["end"]) == (0, "nothing is loaded: rank 1 is lost")
    assert "host" in found["ranges"][0]["places"]
    adapter.problem = ""
    assert adapter.ask("find", tokens=[*tokens_of(3), 1])["hit_tokens"] == 3 * CHUNK_TOKENS


def test_health_has_the_adapters_problem_and_a_thread_that_does_not_run(session, adapter, monkeypatch):
    adapter.problem = "rank 1 is lost"
    assert (adapter.ask("health")["ready"], adapter.ask("health")["problem"]) == (False, "rank 1 is lost")
    adapter.problem = ""
    monkeypatch.setattr(locked_core, "ALIVE_S", -1.0 - locked_core.SECOND_S)
    health = adapter.ask("health")
    assert (health["live"], health["ready"], health["problem"]) == (False, False, "the session's thread does not run")


@pytest.mark.parametrize(
    ("command", "arguments", "error"),
    [
        ("drop", {}, "command 'drop' is unknown; allowed: find, why, prefetch, pin, unpin, clear, health"),
        ("find", {}, "tokens must be a list of at least one token id"),
        ("find", {"tokens": []}, "at least one token id"),
        ("find", {"tokens": "abc"}, "tokens must be a list"),
        ("find", {"tokens": [1, -1]}, r"tokens\[1\] must be an integer in 0..4294967295, got -1"),
        ("find", {"tokens": [1, 2.5]}, r"tokens\[1\] must be"),
        ("find", {"tokens": [1, None]}, r"tokens\[1\] must be"),
        ("find", {"tokens": [1, 1 << 70]}, r"tokens\[1\] must be"),
        ("find", {"tokens": [1], "salt": 5}, "salt must be a string of at most 4096"),
        ("find", {"tokens": [1], "salt": "x" * 5000}, "salt must be a string"),
        ("find", {"tokens": [1], "salt": "\ud800"}, "salt must be a string"),
        ("find", {"tokens": [1], "model": "m"}, r"arguments \['model'\] are unknown; allowed: tokens, salt, adapter"),
        ("why", {}, "request must be the id"),
        ("why", {"request": "r"}, "keeps no history of its requests; use find instead"),
        ("clear", {}, "either all = true or a salt"),
        ("clear", {"all": False}, "either all = true or a salt"),
        ("clear", {"all": 1}, "either all = true or a salt"),
        ("clear", {"all": True, "salt": "a"}, "either all = true or a salt"),
        ("clear", {"salt": None}, "salt must be a string"),
        ("clear", {"model": "m"}, "kvtier inspect free STORE --model ID --age SECONDS"),
        ("clear", {"age": 5}, "kvtier inspect free STORE --model ID --age SECONDS"),
        ("pin", {"tokens": [1]}, "seconds = None; allowed: above 0, up to limits.retain_s = 100"),
        ("pin", {"tokens": [1], "seconds": 101}, "seconds = 101; allowed"),
        ("pin", {"tokens": [1], "seconds": float("nan")}, "seconds = nan; allowed"),
        ("pin", {"tokens": [1], "seconds": True}, "seconds = True; allowed"),
        ("prefetch", {"tokens": [1], "seconds": 1}, "allowed: tokens, salt, adapter"),
        ("unpin", {}, "tokens must be a list of at least one token id"),
        ("health", {"x": 1}, "allowed: none"),
    ],
)
def test_wrong_arguments_get_a_clear_error_and_have_no_effect(session, adapter, command, arguments, error):
    with pytest.raises(ControlError, match=error):
        adapter.ask(command, **arguments)
    assert adapter.cleared == []
    assert adapter.ask("health")["ready"]


def test_answers_hold_no_keys_tokens_or_salts(session, adapter):
    stored(session, "a", prefix_of(3), places_of(range(3)))
    found = [adapter.ask("find", tokens=tokens_of(3), salt=salt) for salt in ("", "s3cret")]
    answers = [*found, adapter.ask("health"), adapter.ask("clear", salt="s3cret")]
    text = control_socket._line({"result": answers}).decode()
    assert "s3cret" not in text
    assert not [key for key in prefix_of(3).keys if key.hex()[:8] in text]
    assert not [token for token in tokens_of(3) if token > 100 and f": {token}," in text]


def test_a_closed_session_answers_without_waiting(slow):
    made, _, _ = local(Engine(64).copier(), {"slow": slow})
    adapter = Adapter(made)
    made.close(5.0)
    assert not adapter.ask("health")["live"]
    with pytest.raises(Exception, match="the session is closed"):
        adapter.ask("find", tokens=[1])
