"""Several replays of one trace, on several processes."""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier.replay.journal import Journal
from kvtier.trace.arrays import TraceArrays

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

JOBS_MAX = 256
_POLL_S = 0.25

Task = TypeVar("Task", bound=Hashable)
Outcome = TypeVar("Outcome", bound="DataclassInstance")
Replayer = Callable[[TraceArrays, Task, Callable[[int], None], Callable[[], bool]], Outcome | None]
"""Replays the trace for one task; tells of requests that are done; asks now and then whether to stop, and may then
return what it has, or None. It can be sent to another process."""


def replay_all(
    packed: TraceArrays,
    tasks: Sequence[Task],
    replayer: Replayer[Task, Outcome],
    *,
    journal: Journal[Outcome] | None,
    is_whole: Callable[[Outcome], bool],
    jobs: int | None,
    advance: Callable[[int], None],
    should_stop: Callable[[], bool],
) -> dict[Task, Outcome]:
    """Replay a trace for each task.

    Args:
        packed: the trace.
        tasks: what to replay.
        replayer: how.
        journal: what is done already, and where to keep what gets done.
        is_whole: whether an outcome is of the whole trace; no other is kept.
        jobs: processes at most; None takes one for each core.
        advance: told of requests that are done.
        should_stop: asked several times a second; once it says so, nothing more begins.

    Returns:
        An outcome for each task, in their order; of those that were begun, if it was stopped.
    """
    known = {task: journal.find(task) for task in tasks} if journal else {}
    done = {task: outcome for task, outcome in known.items() if outcome is not None}
    advance(len(packed) * len(done))
    left = [task for task in dict.fromkeys(tasks) if task not in done]
    count = min(jobs or os.cpu_count() or 1, len(left), JOBS_MAX)
    made = (
        _here(packed, left, replayer, advance, should_stop)
        if count <= 1
        else _apart(packed, left, replayer, count, advance, should_stop)
    )
    for task, outcome in made:
        done[task] = outcome
        if journal and is_whole(outcome):
            journal.add(task, outcome)
    return {task: done[task] for task in tasks if task in done}


def _here(
    packed: TraceArrays,
    tasks: Sequence[Task],
    replayer: Replayer[Task, Outcome],
    advance: Callable[[int], None],
    should_stop: Callable[[], bool],
) -> Iterator[tuple[Task, Outcome]]:
    for task in tasks:
        if should_stop():
            return
        outcome = replayer(packed, task, advance, should_stop)
        if outcome is not None:
            yield task, outcome


def _apart(
    packed: TraceArrays,
    tasks: Sequence[Task],
    replayer: Replayer[Task, Outcome],
    count: int,
    advance: Callable[[int], None],
    should_stop: Callable[[], bool],
) -> Iterator[tuple[Task, Outcome]]:
    # Spawned, not forked: whoever calls us may have threads. They map the trace's columns from files.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvtier-replay-") as folder:
        packed.save(Path(folder))
        ends = context.Event()
        pool = ProcessPoolExecutor(count, context, _begin, (folder, replayer, ends))
        try:
            futures = {pool.submit(_work, task): task for task in tasks}
            waiting = set(futures)
            while waiting:
                if should_stop():
                    ends.set()
                    waiting = {it for it in waiting if not it.cancel()}
                finished, waiting = wait(waiting, _POLL_S, FIRST_COMPLETED)
                for future in finished:
                    advance(len(packed))
                    outcome = future.result(timeout=0)
                    if outcome is not None:
                        yield futures[future], outcome
        finally:
            ends.set()
            pool.shutdown(cancel_futures=True)


_worker: tuple[TraceArrays, Replayer[Any, Any], Event] | None = None


def _begin(folder: str, replayer: Replayer[Any, Any], ends: Event) -> None:
    global _worker  # noqa: PLW0603  one trace for each process of the pool
    # Ctrl-C reaches every process of a terminal; who started this one says when it is to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = (TraceArrays.load(Path(folder)), replayer, ends)


def _work(task: Any) -> Any:  # noqa: ANN401  whatever the replayer takes and gives
    assert _worker is not None, "the pool's initializer ran"
    packed, replayer, ends = _worker
    return None if ends.is_set() else replayer(packed, task, nobody, ends.is_set)


def nobody(_requests: int) -> None:
    """Takes no notice of requests that are done."""
