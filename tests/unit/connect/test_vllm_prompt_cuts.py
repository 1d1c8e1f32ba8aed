"""`why` names where a prompt stops being equal to the most similar earlier one, and nothing where nothing is cut."""

import json
import random
from types import SimpleNamespace

import pytest
from tests.vllm_engine import SmallEngine

from kvtier.connect.vllm.requests import miss_reasons
from kvtier.connect.vllm.requests.account import RequestAccount
from kvtier.connect.vllm.requests.miss_reasons import AROUND_TOKENS, RequestHistory
from kvtier.keys.chain import Chain, Extra
from kvtier.runtime.control_socket import CUT_PARTS, FORMS, _formed

SIZE = 256
DRAW = random.Random(1)


def tokens(count: int) -> list[int]:
    return [DRAW.randrange(1000, 2**31) for _ in range(count)]


HEAD, TEXT, OTHER = tokens(50), tokens(1350), tokens(1350)


class Engine:
    """An engine's history, whose requests end at once unless they are open."""

    def __init__(self, decode=lambda _: None, size: int = SIZE) -> None:
        session = SimpleNamespace(obstacle="", tier_faults=dict, survey=lambda *_: None)
        geometry = SimpleNamespace(chunk_tokens=size, hit_tokens=lambda count: (count - 1) // size * size)
        self.size, self.number = size, 0
        self.history = RequestHistory(session, geometry, str, decode)

    def ask(self, prompt: list[int], *extras: Extra, is_open: bool = False, answer: int = 300) -> str:
        """Add a request with this prompt and an answer. Return its id."""
        name, self.number = f"r{self.number}", self.number + 1
        every = [*prompt, *tokens(answer)]
        keys = Chain(bytes(32), self.size, extras)
        keys.extend(every)
        request = SimpleNamespace(request_id=name, num_prompt_tokens=len(prompt), all_token_ids=every)
        request.skip_reading_prefix_cache = False
        tracked = SimpleNamespace(id=name, number=self.number, request=request, keys=keys, account=RequestAccount())
        tracked.hints, tracked.announced_tokens = SimpleNamespace(max_load_tokens=None), 0
        self.history.arrived(tracked, "")
        if not is_open:
            self.history.ended(tracked)
        return name

    def cuts(self, name: str) -> list[dict]:
        answer = self.history.why(name)
        assert _formed(json.loads(json.dumps(answer)), FORMS["why"]) == answer
        return answer["cuts"]


def salted(name: str) -> Extra:
    return Extra("salt", name.encode())


@pytest.mark.parametrize("is_open", [False, True])
def test_a_stamp_at_token_50_is_found_with_its_tokens_and_what_it_costs(is_open):
    engine = Engine()
    one, two = [*HEAD, 1, 2, 3, *TEXT], [*HEAD, 1, 4, 5, 6, *TEXT]
    before = engine.ask(one, is_open=is_open)
    (cut,) = engine.cuts(engine.ask(two, is_open=is_open))
    assert (cut["request"], cut["at_token"], cut["is_exact"]) == (before, 51, True)
    assert cut["lost_tokens"] == len(one) - 51
    assert len(TEXT) - 16 <= cut["repeated_tokens"] <= len(TEXT)
    assert cut["before"] == {"ids": [*HEAD, 1][-AROUND_TOKENS:], "text": None}
    assert cut["earlier"]["ids"] == one[51:][:AROUND_TOKENS]
    assert cut["this"]["ids"] == two[51:][:AROUND_TOKENS]
    assert engine.cuts(before) == [], "the other request is later"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([*HEAD, *TEXT], [*HEAD, *TEXT]),  # the same prompt
        ([*HEAD, *TEXT], [*HEAD, *TEXT, *OTHER]),  # it only grows
        ([*HEAD, *TEXT, *OTHER], [*HEAD, *TEXT]),  # it is the start of the earlier one
        ([*HEAD, *TEXT], [7, *OTHER]),  # nothing is shared
        ([*HEAD, *TEXT], [7, *HEAD, *TEXT]),  # nor from the start
        ([*HEAD, *TEXT], [*HEAD, *OTHER]),  # two conversations with one template
        ([*HEAD, *TEXT], [*HEAD, *TEXT[:-3], 1, 2, *OTHER]),  # the end of a prompt, which costs no chunk
        ([*HEAD, 1, *TEXT[:100]], [*HEAD, 2, *TEXT]),  # the earlier prompt has no chunk
    ],
)
def test_no_cut_is_named_where_nothing_is_lost(first, second):
    engine = Engine()
    engine.ask(first)
    assert engine.cuts(engine.ask(second)) == []


def test_prompts_that_part_behind_shared_chunks_are_named_and_what_follows_is_not_called_repeated():
    engine = Engine()
    engine.ask([*HEAD, *TEXT])
    (cut,) = engine.cuts(engine.ask([*HEAD, *TEXT[:850], *OTHER]))
    assert (cut["at_token"], cut["lost_tokens"], cut["repeated_tokens"]) == (900, 500, 0)


@pytest.mark.parametrize("kind", ["salt", "adapter", "weights", "epoch"])
def test_prompts_of_two_tenants_are_neither_compared_nor_shown(kind):
    engine = Engine()
    mine, theirs = (Extra(kind, it) for it in (b"mine", b"theirs"))
    one, two = [*HEAD, 1, *TEXT], [*HEAD, 2, *TEXT]
    engine.ask(one, theirs)
    engine.ask(one)
    own = engine.ask(two, mine)
    assert engine.cuts(own) == []
    (cut,) = engine.cuts(engine.ask([*HEAD[:30], 4, *TEXT], mine))
    assert (cut["request"], cut["at_token"]) == (own, 30)
    engine.ask([*HEAD[:30], 5, *TEXT], theirs)  # more similar, if it could be seen
    (cut,) = engine.cuts(engine.ask([*HEAD[:30], 5, 6, *TEXT], mine))
    assert (cut["request"], cut["at_token"], cut["earlier"]["ids"][0]) == ("r3", 30, 4)
    record = engine.history._ended[-1]
    assert b"mine" not in b"".join(digest for _, digest in record.prompt[0].extras)


def test_the_request_of_the_same_session_is_named_although_another_one_is_newer_and_shares_more_of_the_stamp():
    engine = Engine()
    first = engine.ask([*HEAD, 9, 1, *TEXT])
    engine.ask([*HEAD, 8, 1, *OTHER])
    engine.ask([*HEAD, 8, 2, *OTHER[:900]])
    grown = [*HEAD, 8, 3, *TEXT, *tokens(200)]
    (cut,) = engine.cuts(engine.ask(grown))
    assert (cut["request"], cut["at_token"]) == (first, 50)
    (cut,) = engine.cuts(engine.ask([*HEAD, 8, 4, *OTHER, *tokens(200)]))
    assert (cut["request"], cut["at_token"]) == ("r1", 51)


def test_a_cut_behind_shared_chunks_wins_over_more_text_behind_fewer_chunks():
    engine = Engine()
    engine.ask([*HEAD, 1, *TEXT])
    near = engine.ask([*HEAD, 2, *TEXT[:300], *OTHER])
    (cut,) = engine.cuts(engine.ask([*HEAD, 2, *TEXT]))
    assert (cut["request"], cut["at_token"]) == (near, 351)


def test_a_changed_image_is_a_cut_at_its_place():
    engine = Engine()
    engine.ask([*HEAD, *TEXT], Extra("item", b"cat", 700))
    (cut,) = engine.cuts(engine.ask([*HEAD, *TEXT], Extra("item", b"dog", 700)))
    assert (cut["at_token"], cut["lost_tokens"]) == (700, len(HEAD) + len(TEXT) - 700)
    assert engine.cuts(engine.ask([*HEAD, *TEXT], Extra("item", b"dog", 700))) == []


def test_tokens_are_kept_within_a_bound_and_chunk_keys_tell_the_cut_without_them(monkeypatch):
    monkeypatch.setattr(miss_reasons, "PROMPT_BYTES_MAX", 20_000)
    engine = Engine()
    prompt = [*HEAD, *TEXT]
    engine.ask(prompt)
    for _ in range(20):
        engine.ask(tokens(1400))
        kept = [len(it.words) for record in engine.history._ended for it in record.prompt]
        assert sum(kept) <= 20_000
    assert len(kept) == 3, "the newest are kept"
    assert engine.cuts(engine.ask([*HEAD, 1, *TEXT])) == [], "the cut lies in the first chunk"
    assert engine.cuts(engine.ask([*prompt, *OTHER])) == [], "it only grows"
    for _ in range(3):
        engine.ask(tokens(1400))
    (cut,) = engine.cuts(engine.ask([*prompt[:600], 1, *prompt[601:]]))
    assert (cut["request"], cut["at_token"], cut["is_exact"]) == (f"r{engine.number - 5}", 512, False)
    assert (cut["lost_tokens"], cut["repeated_tokens"]) == (1400 - 512, None)
    assert [cut[it] for it in CUT_PARTS] == [{"ids": [], "text": None}] * 3
    monkeypatch.setattr(miss_reasons, "PROMPT_BYTES_MAX", 100)
    engine.ask(prompt)
    assert not [it for record in engine.history._ended for it in record.prompt]


def test_a_request_without_keys_is_neither_remembered_nor_compared():
    engine = Engine()
    engine.ask([*HEAD, 1, *TEXT])
    request = SimpleNamespace(request_id="none", num_prompt_tokens=1400, skip_reading_prefix_cache=False)
    tracked = SimpleNamespace(id="none", number=5, request=request, keys=None, account=RequestAccount())
    tracked.hints, tracked.announced_tokens = SimpleNamespace(max_load_tokens=None), 0
    engine.history.ended(tracked)
    assert engine.cuts("none") == []
    (cut,) = engine.cuts(engine.ask([*HEAD, 2, *TEXT]))
    assert cut["request"] == "r0"


def test_text_is_shown_where_the_process_has_a_tokenizer_and_its_failure_costs_only_the_text():
    engine = Engine(lambda ids: f"<{len(ids)}>")
    engine.ask([*HEAD[:9], 1, *TEXT])
    (cut,) = engine.cuts(engine.ask([*HEAD[:9], 2, *TEXT]))
    assert [cut[it]["text"] for it in CUT_PARTS] == ["<9>", "<16>", "<16>"]
    engine = Engine(lambda ids: ids[99])
    engine.ask([*HEAD, 1, *TEXT])
    (cut,) = engine.cuts(engine.ask([*HEAD, 2, *TEXT]))
    assert [(len(cut[it]["ids"]), cut[it]["text"]) for it in CUT_PARTS] == [(16, None)] * 3


def test_an_engine_names_the_cut_of_open_and_ended_requests_and_nothing_of_one_that_opts_out(caplog):
    engine = SmallEngine(remembers=True)
    try:
        text = [engine.draw.randrange(1000) for _ in range(900)]
        engine.ask([*range(50), 1001, *text], 4, kv_transfer_params={"store": False})
        first = engine.ask([*range(40), 1002, *text], 4)
        second = engine.add([*range(50), 1003, *text], 4)
        for _ in range(2):
            (cut,) = engine.history.why(second.request_id)["cuts"]
            assert (cut["request"], cut["at_token"]) == (first.request_id, 40)
            engine.run()
        assert "1002" not in caplog.text
    finally:
        engine.close()


def test_prompts_longer_than_the_remembered_keys_are_not_called_cut_where_the_keys_end(monkeypatch):
    monkeypatch.setattr(miss_reasons, "PROMPT_BYTES_MAX", 0)
    monkeypatch.setattr(miss_reasons, "KEYS_MAX", 4)
    engine = Engine(size=64)
    engine.ask(TEXT)
    assert engine.cuts(engine.ask(TEXT)) == []
    (cut,) = engine.cuts(engine.ask([*TEXT[:200], *OTHER]))
    assert (cut["at_token"], cut["is_exact"]) == (192, False)
