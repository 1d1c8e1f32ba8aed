"""Hints: what conversations say of their next turn makes room for others, and lies cost little."""

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.traces import replay
from tests.unit.policy.test_adaptive import Prompt, use

from kvtier.policy.adaptive import SLACK, Adaptive, Owner
from kvtier.policy.reuse import ReuseModel
from kvtier.testing.policy_contract import name_of, use_of
from kvtier.tools.trace.arrays import TraceArrays
from kvtier.types import NextTurn

NOBODY = NextTurn.NOBODY


def conversations_that_end(seed: int) -> Iterator[tuple[str, Prompt, bool]]:
    """Twelve agents at a time grow by three names a turn, until each ends at a random turn."""
    chance, fresh = random.Random(seed), iter(range(1, 1 << 30))
    agents: dict[str, Prompt] = {}
    for _ in range(2500):
        if len(agents) < 12:
            agents[f"session {next(fresh)}"] = []
        conversation = chance.choice(list(agents))
        agents[conversation] += [next(fresh) for _ in range(3)]
        ends = chance.random() < 0.1
        yield conversation, list(agents[conversation]), ends
        if ends:
            del agents[conversation]


def hits(turns: Iterator[tuple[str, Prompt, Any]], slots: int, tell: Callable[[Adaptive, str, Any], None]) -> int:
    """Leading names found in all prompts. `tell` gives hints after each turn."""
    evictor, present, found = Adaptive(), set[int](), 0
    for conversation, prompt, said in turns:
        found += next((depth for depth, name in enumerate(prompt) if name not in present), len(prompt))
        for depth in reversed(range(len(prompt))):
            event = use_of(prompt[depth], prompt[depth - 1] if depth else None)._replace(conversation=conversation)
            use(evictor, present, slots, event)
        tell(evictor, conversation, said)
    return found


def hits_of_conversations(tell_end: Callable[[Adaptive, str, bool], None]) -> int:
    return hits(conversations_that_end(4), 260, tell_end)


def test_names_of_sessions_that_have_ended_make_room():
    hinted = hits_of_conversations(
        lambda evictor, conversation, ends: evictor.expects(conversation, NOBODY) if ends else None
    )
    plain = hits_of_conversations(lambda *_: None)
    assert hinted > 1.05 * plain


def test_ends_that_are_told_wrongly_do_little_harm():
    plain = hits_of_conversations(lambda *_: None)
    wrong = hits_of_conversations(
        lambda evictor, conversation, ends: None if ends else evictor.expects(conversation, NOBODY)
    )
    assert wrong > 0.9 * plain


Turn = tuple[str, Prompt, NextTurn]


def agents_and_people(seed: int) -> Iterator[Turn]:
    """Sessions that wait for a tool, which is fast, or for a person, who often does not continue.

    Neither a prompt's length nor its growth tells which.
    """
    chance, fresh = random.Random(seed), iter(range(1, 1 << 30))
    prompts: dict[str, Prompt] = {}
    for _ in range(2500):
        if len(prompts) < 10:
            prompts[f"session {next(fresh)}"] = []
        conversation = chance.choice(list(prompts))
        prompts[conversation] += [next(fresh) for _ in range(3)]
        is_for_user = chance.random() < 0.25
        yield conversation, list(prompts[conversation]), NextTurn.USER if is_for_user else NextTurn.TOOL
        if is_for_user:  # one in ten comes back, under the same name
            away = prompts.pop(conversation)
            if chance.random() < 0.1:
                prompts[conversation] = away


Teller = Callable[[Adaptive, str, NextTurn], None]


def hits_of_turns(tell: Teller) -> int:
    return hits(agents_and_people(5), 160, tell)


@pytest.fixture(scope="module")
def unsaid():
    """Hits without hints."""
    return hits_of_turns(lambda *_: None)


def test_who_has_the_next_turn_decides_who_stays(unsaid):
    assert (
        hits_of_turns(lambda evictor, conversation, next_turn: evictor.expects(conversation, next_turn)) > 1.05 * unsaid
    )


def drawn(seed: int) -> Teller:
    chance = random.Random(seed)
    return lambda evictor, conversation, _: evictor.expects(conversation, chance.choice(list(NextTurn)))


SWAPPED = {NextTurn.TOOL: NextTurn.USER, NextTurn.USER: NextTurn.TOOL}


@pytest.mark.parametrize(
    "lie",
    [
        drawn(1),
        lambda evictor, conversation, _: evictor.expects(conversation, NOBODY),
        lambda evictor, conversation, _: evictor.expects(conversation, NextTurn.TOOL),
        lambda evictor, conversation, next_turn: evictor.expects(conversation, SWAPPED[next_turn]),
        lambda evictor, conversation, next_turn: evictor.expects(f"{conversation}?", next_turn),
    ],
    ids=["at random", "all over", "all tools", "the wrong way round", "unknown session"],
)
def test_lies_about_the_next_turn_do_little_harm(lie, unsaid):
    assert hits_of_turns(lie) > 0.95 * unsaid


def hint_of(evictor: Adaptive, number: int) -> int:
    """The hint in the kind of a name: 0 for none, then by `NextTurn`."""
    run = evictor._entries.get(name_of(number)).run
    assert run is not None
    return run.kind // evictor._model._unhinted


def test_who_is_told_too_late_or_in_pieces_is_sorted_all_the_same():
    ours = Adaptive()
    for number in range(6):
        parent = number - 1 if number else None
        ours.added(use_of(number, parent)._replace(conversation="a"))
        ours.added(use_of(100 + number)._replace(conversation="b"))  # each name of a's prompt arrives alone
    ours.expects("a", NextTurn.USER)
    assert [hint_of(ours, number) for number in range(6)] == [2] * 6
    assert [hint_of(ours, 100 + number) for number in range(5)] == [0] * 5
    ours.expects("a", None)
    assert [hint_of(ours, number) for number in range(6)] == [0] * 6


def test_names_that_others_used_too_are_nobodys():
    ours = Adaptive()
    for conversation, last in (("a", 2), ("b", 3)):
        for number in (last, 1, 0):
            event = use_of(number, {0: None, 1: 0, 2: 1, 3: 1}[number])._replace(conversation=conversation)
            (ours.touched if number in (0, 1) and conversation == "b" else ours.added)(event)
    for conversation in "ab":
        ours.expects(conversation, NOBODY)
    assert [hint_of(ours, number) for number in range(4)] == [0, 0, 3, 3]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("adaptive", []),
        ("adaptive-ends", [(2, "7", None), (3, "8", None), (6, "7", NOBODY), (7, "9", NOBODY)]),
        ("adaptive-turns", [(2, "7", NextTurn.TOOL), (3, "8", NextTurn.USER), (6, "7", None), (7, "9", None)]),
        ("adaptive-hints", [(2, "7", NextTurn.TOOL), (3, "8", NextTurn.USER), (6, "7", NOBODY), (7, "9", NOBODY)]),
    ],
)
def test_a_replay_tells_after_each_request_who_goes_on(monkeypatch, policy, expected):
    passed: list[tuple[int, str, NextTurn | None]] = []
    prompts, sessions = [[0, 1], [2], [0, 1, 3], [4], [2, 5]], [7, 8, 7, 9, 8]
    packed = TraceArrays(
        name="by hand",
        block_tokens=16,
        has_blocks=True,
        ids=np.array([block for prompt in prompts for block in prompt], np.int32),
        starts=np.cumsum([0, *map(len, prompts)]),
        time_s=np.arange(5.0),
        input_tokens=np.array([16 * len(prompt) for prompt in prompts], np.int32),
        output_tokens=np.zeros(5, np.int32),
        session=np.array(sessions, np.int32),
        turn=np.zeros(5, np.int32),
        next_turn=np.array([0, 1, -1, -1, 1], np.int8),
        parents=np.array([-1, 0, -1, 1, -1, 2], np.int32),
        notes=(),
        warnings=(),
        prefix_violations=0,
    )
    monkeypatch.setattr(Adaptive, "expects", lambda self, *hint: passed.append((self._now, *hint)))
    replay(packed, policy, 1600)
    assert passed == expected  # after so many uses


def test_a_session_that_nobody_knows_may_end():
    ours = Adaptive()
    ours.expects("unknown", NOBODY)
    ours.added(use_of(1)._replace(conversation="a"))
    ours.expects("a", NOBODY)
    ours.expects("a", NOBODY)
    assert ours.victim(_nobody) == name_of(1)


def values_when_hints_come_late(watch: Callable[[ReuseModel, int, int, int], None]) -> tuple[float, float]:
    """Of a kind whose names are all used again after 80 uses, and of the same after a hint that comes after 50."""
    model, hinted = ReuseModel(1, 1, 1, 1), 1
    for number in range(300):
        mark, time = number * 0x9E3779B97F4A7C15 % (1 << 64), 100 * number
        model.watch(mark, 0, time)
        watch(model, mark, hinted, time + 50)
        model.used(mark, time + 80)
    list(model.training(30_000, 100))
    return model.value(0, 0), model.value(hinted, 0)


def test_a_hint_that_comes_late_takes_nothing_from_who_waits_for_it():
    unhinted, hinted = values_when_hints_come_late(ReuseModel.watch_hinted)
    assert unhinted == pytest.approx(values_when_hints_come_late(lambda *_: None)[0])
    assert hinted > 1.5 * unhinted
    # The control: when the first watch ends with the hint, and the second counts in its place, ages are mixed up.
    assert values_when_hints_come_late(ReuseModel.watch)[0] > 1.1 * unhinted


def test_a_name_that_is_hinted_again_and_again_leaves_no_watch_behind():
    model = ReuseModel(1, 1, 1, 2)
    for time in range(0, 400, 4):
        model.watch(7, 0, time)
        model.watch_hinted(7, 1, time + 1)
        model.watch_hinted(7, 2, time + 2)
        model.used(7, time + 3)
        assert not model.watched
    assert set(model._kinds) == {-1}


def _nobody(name: bytes) -> bool:
    return False


def test_sessions_without_names_are_forgotten_at_once_whoever_left_first():
    """Not when memory is next searched for rings: hints would do more or less by chance."""
    evictor = Adaptive()
    gc.collect()
    gc.disable()
    try:
        before = _sessions_in_memory()
        for conversation in range(1000):
            parent, child = 2 * conversation, 2 * conversation + 1
            for event in use_of(child, parent), use_of(parent):
                evictor.added(event._replace(conversation=f"session {conversation}"))
            evictor.victim(lambda _name: False)
            evictor.removed(name_of(parent))
            evictor.removed(name_of(child))
        assert _sessions_in_memory() - before <= 2 * SLACK
    finally:
        gc.enable()


def _sessions_in_memory() -> int:
    return sum(type(it) is Owner for it in gc.get_objects())
