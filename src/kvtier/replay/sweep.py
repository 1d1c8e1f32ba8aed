"""Many replays of one trace, on several processes, with a journal of finished ones."""

import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import xxhash

from kvtier import __version__
from kvtier.errors import ConfigError
from kvtier.replay.policies.registry import check_policy
from kvtier.replay.single_cache import CacheResult, Task, capacity_blocks, replay_task
from kvtier.trace.arrays import TraceArrays

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

JOBS_MAX = 256
JOURNAL_BYTES_MAX = 1 << 28
_POLL_S = 0.25

TaskT = TypeVar("TaskT", bound=Hashable)
ResultT = TypeVar("ResultT", bound="DataclassInstance")
Replayer = Callable[[TraceArrays, TaskT, Callable[[int], None], Callable[[], bool]], ResultT | None]
"""Replays a trace for one task. It calls `advance` with finished requests and polls `should_stop`; when stopped, it
returns a partial result or None. It must be picklable."""


def sweep(
    trace: TraceArrays,
    tasks: Sequence[Task],
    *,
    jobs: int | None = None,
    keep: Path | None = None,
    advance: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[CacheResult]:
    """Replay a trace for each task.

    Args:
        trace: the trace.
        tasks: checked before any replay starts.
        jobs: most processes; None: one for each core.
        keep: file of the journal.
        advance: called with the number of requests done since the last call.
        should_stop: polled several times a second; once true, no replay starts.

    Returns:
        The results, in the order of the tasks; when stopped, only those of finished replays.

    Raises:
        ConfigError: a task is not possible, or the journal cannot be read.
    """
    for task in tasks:
        capacity_blocks(trace, task.capacity_tokens)
        check_policy(task.policy)
    done = replay_all(
        trace,
        tasks,
        replay_task,
        read=lambda plain: CacheResult(**plain),
        is_complete=lambda _: True,
        jobs=jobs,
        keep=keep,
        advance=advance,
        should_stop=should_stop,
    )
    return list(done.values())


def replay_all(
    trace: TraceArrays,
    tasks: Sequence[TaskT],
    replayer: Replayer[TaskT, ResultT],
    *,
    read: Callable[[dict[str, Any]], ResultT],
    is_complete: Callable[[ResultT], bool],
    jobs: int | None,
    keep: Path | None,
    advance: Callable[[int], None],
    should_stop: Callable[[], bool],
) -> dict[TaskT, ResultT]:
    """Replay a trace for each task.

    Args:
        trace: the trace.
        tasks: what to replay.
        replayer: runs one task.
        read: makes a result from the output of `asdict`.
        is_complete: whether a result covers the whole trace; only those go to the journal.
        jobs: most processes; None: one for each core.
        keep: file of the journal.
        advance: called with the number of requests done since the last call.
        should_stop: polled several times a second; once true, no replay starts.

    Returns:
        The results, in the order of the tasks; when stopped, only those of replays that started.

    Raises:
        ConfigError: the journal cannot be read or written.
    """
    journal = FinishedReplays(keep, trace, read) if keep else None
    known = {task: journal.find(task) for task in tasks} if journal else {}
    done = {task: result for task, result in known.items() if result is not None}
    advance(len(trace) * len(done))
    left = [task for task in dict.fromkeys(tasks) if task not in done]
    processes = min(jobs or os.cpu_count() or 1, len(left), JOBS_MAX)
    if processes > 1:
        results = _in_pool(trace, left, replayer, processes, advance, should_stop)
    else:
        results = _in_process(trace, left, replayer, advance, should_stop)
    for task, result in results:
        done[task] = result
        if journal and is_complete(result):
            journal.add(task, result)
    return {task: done[task] for task in tasks if task in done}


def _in_process(
    trace: TraceArrays,
    tasks: Sequence[TaskT],
    replayer: Replayer[TaskT, ResultT],
    advance: Callable[[int], None],
    should_stop: Callable[[], bool],
) -> Iterator[tuple[TaskT, ResultT]]:
    for task in tasks:
        if should_stop():
            return
        result = replayer(trace, task, advance, should_stop)
        if result is not None:
            yield task, result


def _in_pool(
    trace: TraceArrays,
    tasks: Sequence[TaskT],
    replayer: Replayer[TaskT, ResultT],
    processes: int,
    advance: Callable[[int], None],
    should_stop: Callable[[], bool],
) -> Iterator[tuple[TaskT, ResultT]]:
    # Spawned, not forked: the caller may have threads. Workers map the trace's columns from files.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvtier-replay-") as folder:
        trace.save(Path(folder))
        stops = context.Event()
        pool = ProcessPoolExecutor(processes, context, _start_worker, (folder, replayer, stops))
        try:
            futures = {pool.submit(_work, task): task for task in tasks}
            waiting = set(futures)
            while waiting:
                if should_stop():
                    stops.set()
                    waiting = {it for it in waiting if not it.cancel()}
                finished, waiting = wait(waiting, _POLL_S, FIRST_COMPLETED)
                for future in finished:
                    advance(len(trace))
                    result = future.result(timeout=0)
                    if result is not None:
                        yield futures[future], result
        finally:
            stops.set()
            pool.shutdown(cancel_futures=True)


_worker: tuple[TraceArrays, Replayer[Any, Any], Event] | None = None


def _start_worker(folder: str, replayer: Replayer[Any, Any], stops: Event) -> None:
    global _worker  # noqa: PLW0603  one trace for each process of the pool
    # Ctrl-C reaches every process of a terminal; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = (TraceArrays.load(Path(folder)), replayer, stops)


def _work(task: Any) -> Any:  # noqa: ANN401  types of the replayer
    assert _worker is not None, "the pool's initializer ran"
    trace, replayer, stops = _worker
    return None if stops.is_set() else replayer(trace, task, lambda _: None, stops.is_set)


class FinishedReplays(Generic[ResultT]):
    """Finished replays of one trace in a file of JSON lines; other traces' and versions' lines are ignored.

    Args:
        path: the file; created with the first result.
        trace: the trace.
        read: makes a result from the output of `asdict`.

    Raises:
        ConfigError: the file cannot be read or is not a journal.
    """

    def __init__(self, path: Path, trace: TraceArrays, read: Callable[[dict[str, Any]], ResultT]) -> None:
        self._path = path
        self._trace = _digest(trace)
        self._done: dict[str, ResultT] = {}
        try:
            if path.exists() and path.stat().st_size > JOURNAL_BYTES_MAX:
                raise ConfigError(f"--keep {str(path)!r} is too long; allowed: at most {JOURNAL_BYTES_MAX} bytes")
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--keep {str(path)!r} cannot be read: {error}") from error
        # What follows the last line end was cut by an interrupt: that replay runs again.
        whole, newline, cut = text.rpartition("\n")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry: dict[str, Any] = json.loads(line)
                if entry["trace"] == self._trace:
                    self._done[entry["task"]] = read(_checked(entry))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ConfigError(
                    f"--keep {str(path)!r}, line {number}: not made by `kvtier replay`: {error}"
                ) from error
        self._whole_bytes = len((whole + newline).encode()) if cut else None

    def find(self, task: Hashable) -> ResultT | None:
        """The result of `task`, whose `repr` identifies it."""
        return self._done.get(repr(task))

    def add(self, task: Hashable, result: ResultT) -> None:
        """Append a result.

        Raises:
            ConfigError: the file cannot be written.
        """
        plain = asdict(result)
        checksum = _checksum(repr(task), plain)
        line = json.dumps({"trace": self._trace, "task": repr(task), "checksum": checksum, "outcome": plain})
        try:
            if self._whole_bytes is not None:
                os.truncate(self._path, self._whole_bytes)
                self._whole_bytes = None
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(f"{line}\n")
        except OSError as error:
            raise ConfigError(f"--keep {str(self._path)!r} cannot be written: {error.strerror or error}") from error


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    if entry["checksum"] != _checksum(entry["task"], entry["outcome"]):
        raise ValueError("checksum mismatch")
    return entry["outcome"]


def _checksum(task: str, result: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps([task, result]).encode())


def _digest(trace: TraceArrays) -> str:
    hasher = xxhash.xxh3_128(repr((trace.block_tokens, __version__)).encode())
    for column in (trace.ids, trace.starts, trace.time_s, trace.input_tokens, trace.session):
        hasher.update(column.data)
    return hasher.hexdigest()
