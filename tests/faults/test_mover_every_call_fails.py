"""The n-th call of a tier or a copier fails, for every n and every kind: no wrong byte is DONE, nothing hangs."""

import logging
from functools import partial

import pytest
from mover_world import CHUNKS, WAIT_S, NthCallCopier, NthCallTier, World, codec_of
from tests.memory_tier import MemoryTier
from tests.system import until

from kvtier.runtime import mover as module
from kvtier.runtime.command_runner import NOT_ADMITTED
from kvtier.runtime.executor import Completion
from kvtier.runtime.mover import Mover
from kvtier.types import Direction, Outcome, Transfer

CALLS_MAX = 60


def _there_and_back(world: World) -> list[Completion]:
    """Demote chunks, probe them, promote them to other slots and blocks, and drop one."""
    answers: list[Completion] = []
    for chunk in (1, 2):
        for group in (0, 1):
            slot = chunk
            answers += world.run(world.transfer(Direction.GATHER, chunk, slot, group=group))
            if answers[-1].outcome is not Outcome.DONE:
                continue  # the core would not demote it either
            assert world.is_in_slot(chunk, slot, group)
            answers += world.run(world.transfer(Direction.DEMOTE, chunk, slot, group=group))
            world.spoil(slot, group)
    answers += world.run(world.probe([(1, 0), (1, 1), (2, 0), (2, 1)]))
    for chunk in (1, 2):
        for group in (0, 1):
            slot, place = chunk + 4, CHUNKS + chunk
            answers += world.run(world.transfer(Direction.PROMOTE, chunk, slot, group=group))
            if answers[-1].outcome is not Outcome.DONE:
                continue  # nor scatter it
            assert world.is_in_slot(chunk, slot, group), "wrong bytes are DONE"
            answers += world.run(world.transfer(Direction.SCATTER, chunk, slot, group=group, place=place))
            if answers[-1].outcome is Outcome.DONE:
                assert world.is_at(chunk, place, group)
    answers += world.run(world.drop(1))
    assert world.mover.take() == [], "something was answered twice"
    return answers


def _failures(answers: list[Completion]) -> list[Completion]:
    return [completion for completion in answers if completion.outcome is not Outcome.DONE]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("way", NthCallTier.WAYS)
def test_the_nth_call_of_a_tier_fails(way: str, codec: str) -> None:
    for n in range(1, CALLS_MAX):
        tier = NthCallTier(MemoryTier(capacity_bytes=1 << 24), n, way)
        with World({"memory": tier}, codec=codec_of(codec)) as world:
            answers = _there_and_back(world)
            for completion in _failures(answers):
                assert completion.detail
                is_fault = completion.outcome is Outcome.FAILED and completion.detail != NOT_ADMITTED
                assert completion.is_tier_fault == is_fault
            # Afterwards all is well again: the failure left nothing behind in the mover.
            tier.n = 0
            world.stored(3)
            world.done(world.transfer(Direction.PROMOTE, 3, 7))
            assert world.is_in_slot(3, 7)
        if tier.calls < n:
            assert not _failures(answers)
            return
    raise AssertionError("the scenario never passed untouched")


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, SystemExit])
def test_the_nth_call_of_a_copier_fails(error: type[BaseException]) -> None:
    for n in range(1, CALLS_MAX):
        with World(wrap=partial(NthCallCopier, n=n, error=error)) as world:
            answers = _there_and_back(world)
            failed = [completion for completion in _failures(answers) if completion.outcome is Outcome.FAILED]
            for completion in failed:
                assert isinstance(completion.command, Transfer)
                assert completion.command.direction in (Direction.GATHER, Direction.SCATTER)
                assert error.__name__ in completion.detail
                assert not completion.is_tier_fault
            if world.copier.calls < n:
                assert not _failures(answers)
                return
            assert len(failed) == 1
    raise AssertionError("the scenario never passed untouched")


def test_damage_is_corrupt_and_names_the_object() -> None:
    for way in ("truncate", "too long", "flip", "flip padding", "other"):
        tier = NthCallTier(MemoryTier(capacity_bytes=1 << 24), 0, way)
        with World({"memory": tier}) as world:
            world.stored(1, 2)
            tier.n = tier.calls + 1
            (completion,) = world.run(world.transfer(Direction.PROMOTE, 1, 5))
            assert completion.outcome is Outcome.CORRUPT, way
            assert world.name(1).hex()[:12] in completion.detail
            assert completion.size_bytes == 0


def test_faults_are_logged_but_not_each_one(caplog: pytest.LogCaptureFixture) -> None:
    tier = MemoryTier(capacity_bytes=1 << 24)
    with World({"memory": tier}) as world:
        world.done(world.transfer(Direction.GATHER, 1, 0))
        caplog.clear()
        world.done(world.transfer(Direction.DEMOTE, 1, 0))
        assert world.run(world.transfer(Direction.PROMOTE, 2, 1))[0].outcome is Outcome.ABSENT
        assert not caplog.records, "what is usual is not logged"
        tier.close()
        for _ in range(20):
            world.run(world.transfer(Direction.PROMOTE, 1, 1))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "promote of tier 'memory' failed: tier 'memory': is closed"


@pytest.mark.parametrize("name", ["_complete", "_judged", "Completion"])
def test_an_internal_error_of_the_mover_fails_its_commands_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    owner = module if name == "Completion" else Mover
    real = getattr(owner, name)
    mistakes = iter([KeyError("planted")])

    def wrong(*arguments: object, **named: object) -> object:
        for mistake in mistakes:
            raise mistake
        return real(*arguments, **named)

    tier = MemoryTier(capacity_bytes=1 << 24)
    with World({"memory": tier}) as world:
        monkeypatch.setattr(owner, name, wrong)
        if name == "_judged":
            tier.close()
            (completion,) = world.run(world.probe([(1, 0)]))
        else:
            (completion,) = world.run(world.transfer(Direction.GATHER, 1, 0))
        assert completion.outcome is Outcome.FAILED
        assert world.mover.take() == []
        assert "KeyError: 'planted'" in completion.detail
        world.done(world.transfer(Direction.GATHER, 2, 1))
        assert world.mover.close(WAIT_S)
    assert [record.levelname for record in caplog.records if "internal error" in record.getMessage()] == ["ERROR"]


def test_an_answer_that_is_not_taken_is_given_once_more_as_failed() -> None:
    taken: list[Completion] = []

    def put(completion: Completion) -> None:
        if completion.outcome is Outcome.DONE and len(taken) == 1:
            raise KeyError("planted")
        taken.append(completion)

    with World() as world:
        world.mover.complete_to(put)
        for chunk in (1, 2, 3):
            world.mover.submit(world.transfer(Direction.GATHER, chunk, chunk))
        until(lambda: len(taken) == 3, "an answer is lost", WAIT_S)
    assert Outcome.FAILED in [completion.outcome for completion in taken]
