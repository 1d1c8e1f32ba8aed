"""Many replays of one trace through one cache: policies by capacities."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kvtier.replay.hits import Outcome, capacity_blocks, replay
from kvtier.replay.journal import Journal
from kvtier.replay.parallel import nobody, replay_all
from kvtier.replay.policies.registry import make_policy
from kvtier.trace.arrays import TraceArrays


class Task(NamedTuple):
    """One replay."""

    policy: str
    capacity_tokens: int | None


def sweep(
    packed: TraceArrays,
    tasks: Sequence[Task],
    *,
    jobs: int | None = None,
    keep: Path | None = None,
    advance: Callable[[int], None] = nobody,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Replay a trace for each task.

    Args:
        packed: the trace.
        tasks: what to replay; checked before anything runs.
        jobs: processes at most; None takes one for each core.
        keep: file of what is done already, and where to keep what gets done.
        advance: told of requests that are done.
        should_stop: asked several times a second; once it says so, what is under way is given up.

    Returns:
        An outcome for each task, in their order; of those that were done, if it was stopped.

    Raises:
        ConfigError: a task is not possible, or `keep` is no such file.
    """
    for task in tasks:
        capacity_blocks(packed, task.capacity_tokens)
    for policy in {task.policy for task in tasks}:
        make_policy(policy, 1, _empty(packed))
    done = replay_all(
        packed,
        tasks,
        _replayed,
        journal=Journal(keep, packed, lambda plain: Outcome(**plain)) if keep else None,
        is_whole=lambda _outcome: True,
        jobs=jobs,
        advance=advance,
        should_stop=should_stop,
    )
    return list(done.values())


class _StoppedError(Exception):
    """Leaves a replay that is under way."""


def _replayed(
    packed: TraceArrays, task: Task, advance: Callable[[int], None], should_stop: Callable[[], bool]
) -> Outcome | None:
    def go_on(requests: int) -> None:
        if should_stop():
            raise _StoppedError
        advance(requests)

    try:
        return replay(packed, task.policy, task.capacity_tokens, advance=go_on)
    except _StoppedError:
        return None


def _empty(packed: TraceArrays) -> TraceArrays:
    """A trace without requests, to see whether a policy can be made at all."""
    return replace(
        packed,
        ids=packed.ids[:0],
        starts=packed.starts[:1],
        time_s=packed.time_s[:0],
        input_tokens=packed.input_tokens[:0],
        output_tokens=packed.output_tokens[:0],
        session=packed.session[:0],
        turn=packed.turn[:0],
        next_turn=packed.next_turn[:0],
        parents=packed.parents[:0],
    )
