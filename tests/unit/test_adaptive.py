"""The adaptive policy: what it learns, whom it spares, what it costs. What holds for all policies: `test_policies`."""

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.policy import adaptive
from kvtier.policy.adaptive import Adaptive
from kvtier.policy.base import Evictor
from kvtier.policy.fifo import Fifo
from kvtier.policy.ghosts import Ghosts
from kvtier.policy.lru import Lru
from kvtier.policy.reuse import WATCHED_MAX, ReuseModel
from kvtier.testing.policy import held, name_of

Prompt = list[int]


def chats_among_documents(prompts: int, seed: int) -> Iterator[Prompt]:
    """Chats grow by a name at each turn; between two turns come prompts of twelve names that nobody ever asks again."""
    chance = random.Random(seed)
    fresh = iter(range(1, 1 << 30))
    chats = [[next(fresh) for _ in range(4)] for _ in range(12)]
    for _ in range(prompts):
        if chance.random() < 0.3:
            chat = chance.choice(chats)
            chat.append(next(fresh))
            if len(chat) > 12:
                chat[:] = [next(fresh) for _ in range(4)]
            yield list(chat)
        else:
            yield [next(fresh) for _ in range(12)]


def hits(make: Callable[[], Evictor], prompts: Iterator[Prompt], slots: int, *, is_from_start: bool = False) -> int:
    """Leading names found, of all prompts, in a place of so many slots."""
    evictor, present, found = make(), set[int](), 0
    for prompt in prompts:
        missing = next((depth for depth, name in enumerate(prompt) if name not in present), len(prompt))
        found += missing
        depths = range(len(prompt)) if is_from_start else reversed(range(len(prompt)))
        for depth in depths:
            event = held(prompt[depth], prompt[depth - 1] if depth else None, depth=depth)
            if prompt[depth] in present:
                evictor.touched(event)
                continue
            if len(present) >= slots:
                victim = evictor.victim(_nobody)
                assert victim is not None
                present.remove(int.from_bytes(victim))
                evictor.removed(victim)
            present.add(prompt[depth])
            evictor.added(event)
    return found


@pytest.mark.parametrize("is_from_start", [False, True])
def test_documents_that_nobody_asks_again_make_room_for_chats(is_from_start):
    lru, ours = (
        hits(make, chats_among_documents(3000, 1), 100, is_from_start=is_from_start) for make in (Lru, Adaptive)
    )
    assert ours > 1.5 * lru


def test_what_is_learned_makes_the_difference(monkeypatch):
    learned = hits(Adaptive, chats_among_documents(3000, 1), 100)
    monkeypatch.setattr(ReuseModel, "watch", lambda *_: None)
    assert hits(Adaptive, chats_among_documents(3000, 1), 100) < learned / 1.3


def test_the_same_events_give_the_same_victims():
    assert hits(Adaptive, chats_among_documents(800, 3), 80) == hits(Adaptive, chats_among_documents(800, 3), 80)


def test_where_kinds_do_not_differ_the_oldest_goes_first():
    ours, lru = Adaptive(), Lru()
    for number in range(200):
        for evictor in (ours, lru):
            evictor.added(held(number))
    for _ in range(190):
        victims = [evictor.victim(_nobody) for evictor in (ours, lru)]
        assert victims[0] == victims[1]
        for evictor in (ours, lru):
            evictor.removed(victims[0] or b"")


NUMBERS = st.integers(0, 11)
STEPS = st.lists(
    st.tuples(st.sampled_from(["added", "touched", "removed", "evict"]), NUMBERS, st.sets(NUMBERS, max_size=6)),
    max_size=150,
)


def spares_parents_and_pins(evictor: Evictor, steps: list[tuple[str, int, set[int]]]) -> None:
    """Three prompts: 0 is the start of two of them. A victim is present, free, and nobody's parent."""
    present: dict[int, int | None] = {}
    for step, number, pins in steps:
        parent = None if number in (0, 9) else {5: 0}.get(number, number - 1)
        event = held(number, parent)
        if step == "added":
            evictor.added(event)
            present[number] = parent
        elif step == "touched":
            evictor.touched(event)
        elif step == "removed":
            evictor.removed(event.name)
            present.pop(number, None)
        else:
            victim = evictor.victim({name_of(pin) for pin in pins}.__contains__)
            leaves = present.keys() - present.values()
            assert (victim is None) == (not leaves - pins)
            if victim is not None:
                assert int.from_bytes(victim) in leaves - pins
                evictor.removed(victim)
                del present[int.from_bytes(victim)]


@settings(max_examples=400, derandomize=True, deadline=None)
@given(STEPS)
def test_a_victim_is_a_leaf_that_nobody_pins(steps):
    spares_parents_and_pins(Adaptive(), steps)


def test_the_property_finds_who_takes_parents():
    with pytest.raises(AssertionError):
        spares_parents_and_pins(Fifo(), [("added", 0, set()), ("added", 1, set()), ("evict", 0, set())])


def test_many_pinned_are_not_looked_at_again_for_every_victim():
    ours = Adaptive()
    pinned = {name_of(number) for number in range(2000)}
    for number in range(4000):
        ours.added(held(number))
    asked = 0

    def is_pinned(name: bytes) -> bool:
        nonlocal asked
        asked += 1
        return name in pinned

    for _ in range(2000):
        victim = ours.victim(is_pinned)
        assert victim is not None
        assert victim not in pinned
        ours.removed(victim)
    assert asked <= 3 * 4000
    assert ours.victim(is_pinned) is None


def test_memory_stays_bounded_whatever_comes():
    ours = Adaptive()
    for number in range(60_000):
        ours.added(held(number, parent=number - 1 if number % 3 else None))
        ours.touched(held(number))
        if number == 200:
            assert ours.victim(_nobody) is not None
        if number >= 100:
            ours.removed(name_of(number - 100))
    queued = sum(len(run.entries) for queue in ours._queues.values() for run in queue.runs)
    assert queued <= 2 * len(ours) + adaptive._SLACK
    assert len(ours._children) <= len(ours) + 1
    assert len(ours._model) <= WATCHED_MAX
    assert len(ours._model._open) <= WATCHED_MAX
    assert ours._ghosts is not None
    assert len(ours._ghosts) <= 4 * adaptive._GHOSTS * 100


def test_a_use_that_another_follows_soon_is_worth_more_than_one_that_waits_or_waits_in_vain():
    model = ReuseModel(3)
    for step in range(3000):
        now = 10 * step
        model.watch(3 * step, 0, now, 1)
        model.watch(3 * step + 1, 1, now, 1)
        model.watch(3 * step + 2, 2, now, 1)
        if step:
            model.used(3 * (step - 1), now)  # after 10
        if step >= 20:
            model.used(3 * (step - 20) + 1, now)  # after 200
    model.learn(30_000, 100)
    soon, late, never = (model.values(range(3))[kind] for kind in range(3))
    assert 1 / 10 <= soon[0] < 2 / 10  # an age in a bucket counts as half of it
    assert 1 / 200 <= late[0] < 2 / 200
    assert never[0] < late[0] / 5
    assert late[0] < late[model.bucket(150)]  # who waited for so long will not have to wait much longer


def test_outcomes_count_only_when_both_could_have_come():
    model = ReuseModel(1)
    model.watch(1, 0, 0, 1)
    model.watch(2, 0, 0, 1)
    model.used(1, 5)
    model.learn(6, 100)  # the first bucket ends at 12.5
    assert sum(map(sum, model._again)) == 0
    model.learn(20, 100)
    assert sum(map(sum, model._again)) == pytest.approx(1, rel=0.2)
    assert sum(map(sum, model._passed)) == pytest.approx(1, rel=0.2)


def test_when_there_is_too_much_to_watch_half_is_watched():
    model = ReuseModel(1)
    for number in range(3 * WATCHED_MAX):
        model.watch(number, 0, number, 1)
    assert WATCHED_MAX // 2 <= len(model) <= WATCHED_MAX


def test_ghosts_know_who_left_last_from_a_place():
    ghosts = Ghosts(16)
    mark = 0xABCDEF0123456785
    assert len(ghosts) == 16
    assert ghosts.uses(mark) == 0
    ghosts.remember(mark, 3)
    assert ghosts.uses(mark) == 3
    assert ghosts.uses(mark ^ 1 << 60) == 0
    ghosts.remember(mark ^ 1 << 60, 99)
    assert ghosts.uses(mark) == 0
    assert ghosts.uses(mark ^ 1 << 60) == 15


def test_who_comes_back_is_known():
    ours = Adaptive()
    for number in range(4):
        ours.added(held(number))
    assert ours.victim(_nobody) == name_of(0)
    ours.removed(name_of(0))
    ours.added(held(0))
    assert ours._entries[name_of(0)].uses == 1


def _nobody(_name: bytes) -> bool:
    return False
