"""Replays a whole trace through one cache without warm-up, and runs many replays of a trace in several processes.

A request's hit is the longest leading run of cached blocks, in tokens, but at most the prompt's tokens. Then all blocks
of the request are accessed from the last to the first: hits are touched, and misses are inserted. Capacity and written
tokens count whole blocks. A journal keeps the finished replays.
"""

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import xxhash

from kvtier import __version__
from kvtier.errors import ConfigError
from kvtier.tools.replay.policies.registry import check_policy, make_policy
from kvtier.tools.trace.arrays import TraceArrays

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_STEP, _STEP_BLOCKS = 1024, 1 << 15
"""Number of requests, and approximate number of accesses, between two calls of `should_stop`. They take at most 0.3 s
with the slowest policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult:
    """The result of a replay with one policy and capacity."""

    policy: str
    capacity_tokens: int | None
    """Capacity of the cache; None if unlimited."""
    hit_rate: float
    """Hit tokens divided by input tokens."""
    hit_tokens: int
    block_hits: int
    """Accesses to cached blocks, inside and outside leading runs."""
    evictions: int
    written_tokens: int
    """Tokens of inserted blocks. Each block counts as a whole one."""
    peak_tokens: int
    """Largest number of tokens cached at the start of a request or at the end of the trace."""
    mean_tokens: float
    """Mean number of cached tokens over time."""
    cpu_s: float = field(default=0.0, compare=False)
    """Processor time of the replay, in seconds."""
    hit_rates: tuple[float, ...] = field(default=(), compare=False)
    """Hit rate of each draw of start times, if this result is the mean of several replays."""


def mean_of(results: Sequence[CacheResult]) -> CacheResult:
    """Return the mean of the replays of one task with different draws of start times. Counts are rounded."""
    if len(results) == 1:
        return results[0]
    names = (*_COUNTS, "hit_rate", "mean_tokens", "cpu_s")
    means = {name: fmean(getattr(it, name) for it in results) for name in names}
    means |= {name: round(means[name]) for name in _COUNTS}
    values: dict[str, Any] = {**asdict(results[0]), **means, "hit_rates": tuple(it.hit_rate for it in results)}
    return CacheResult(**values)


_COUNTS = ("hit_tokens", "block_hits", "evictions", "written_tokens", "peak_tokens")


class Task(NamedTuple):
    """The policy and capacity of one replay."""

    policy: str
    """Name of the policy, as in `make_policy`."""
    capacity_tokens: int | None
    """Capacity of the cache; None if unlimited."""


def capacity_blocks(trace: TraceArrays, capacity_tokens: int | None) -> int:
    """Return the number of whole blocks in a capacity, or of all blocks in the trace if the capacity is None.

    Raises:
        ConfigError: no block fits.
    """
    if capacity_tokens is None:
        return max(trace.block_count, 1)
    if capacity_tokens < trace.block_tokens:
        raise ConfigError(
            f"--capacity-tokens {capacity_tokens} is less than a block; allowed: at least {trace.block_tokens} tokens"
        )
    return capacity_tokens // trace.block_tokens


def replay_task(
    trace: TraceArrays, task: Task, advance: Callable[[int], None], should_stop: Callable[[], bool]
) -> CacheResult | None:
    """Replay a trace. Return None if the replay was stopped.

    Args:
        trace: the trace.
        task: policy and capacity.
        advance: called with the number of requests done since the last call.
        should_stop: polled during the replay.

    Raises:
        ConfigError: the trace has no blocks, or the policy or capacity is invalid.
    """
    if not trace.has_blocks:
        raise ConfigError(f"trace {trace.name} has no blocks, so it has no hits; use `kvtier replay describe`")
    begun_s = time.process_time()
    policy = make_policy(task.policy, capacity_blocks(trace, task.capacity_tokens), trace)
    present, block_tokens, before_s = policy.present, trace.block_tokens, float(trace.time_s[0])
    hit_tokens = block_hits = written = peak = 0
    held_s = 0.0
    step = min(_STEP, max(1, _STEP_BLOCKS * len(trace) // max(1, len(trace.ids))))
    for start in range(0, len(trace), step):
        if should_stop():
            return None
        for request, (time_s, input_tokens, blocks) in enumerate(_requests(trace, start, start + step), start):
            held_s += policy.held * (time_s - before_s)
            before_s = time_s
            policy.begin(request)
            peak = max(peak, policy.held)
            run = 0
            for block in blocks:
                if not present[block]:
                    break
                run += 1
            hit_tokens += min(run * block_tokens, input_tokens)
            hits, inserted = policy.access(blocks)
            block_hits += hits
            written += inserted
        advance(min(step, len(trace) - start))
    duration_s = float(trace.time_s[-1]) - float(trace.time_s[0])
    total = int(trace.input_tokens.sum(dtype="int64"))
    return CacheResult(
        policy=task.policy,
        capacity_tokens=task.capacity_tokens,
        hit_rate=hit_tokens / total if total else 0.0,
        hit_tokens=hit_tokens,
        block_hits=block_hits,
        evictions=policy.evictions,
        written_tokens=written * block_tokens,
        peak_tokens=max(peak, policy.held) * block_tokens,
        mean_tokens=(held_s / duration_s if duration_s > 0 else float(policy.held)) * block_tokens,
        cpu_s=time.process_time() - begun_s,
    )


def _requests(trace: TraceArrays, start: int, stop: int) -> Iterator[tuple[float, int, list[int]]]:
    """Yield the time, the input tokens and the blocks of each request from `start` to `stop`."""
    edges = trace.starts[start : stop + 1].tolist()
    ids: list[int] = trace.ids[edges[0] : edges[-1]].tolist()
    times, inputs = trace.time_s[start:stop].tolist(), trace.input_tokens[start:stop].tolist()
    for first, last, time_s, input_tokens in zip(edges, edges[1:], times, inputs, strict=False):
        yield time_s, input_tokens, ids[first - edges[0] : last - edges[0]]


JOBS_MAX = 256
JOURNAL_BYTES_MAX = 1 << 28
_POLL_S = 0.25

TaskT = TypeVar("TaskT", bound=Hashable)
ResultT = TypeVar("ResultT", bound="DataclassInstance")
Replayer = Callable[[TraceArrays, TaskT, Callable[[int], None], Callable[[], bool]], ResultT | None]
"""A picklable function that replays a trace for one task. It calls `advance` with the number of finished requests, and
polls `should_stop`. If stopped, it returns a partial result or None."""


def sweep(
    trace: TraceArrays,
    tasks: Sequence[Task],
    *,
    jobs: int | None = None,
    keep: Path | None = None,
    advance: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[CacheResult]:
    """Replay a trace through one cache for each policy and capacity.

    Args:
        trace: the trace.
        tasks: policies and capacities, which are checked before any replay starts.
        jobs: largest number of processes; None means one for each core.
        keep: file of the journal, which keeps finished replays for the next call.
        advance: called with the number of requests done since the last call.
        should_stop: polled several times a second; once it returns True, no further replay starts.

    Returns:
        The results in the order of the tasks. If stopped, only those of finished replays.

    Raises:
        ConfigError: a task is invalid, or the journal cannot be read.
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
    """Replay a trace for each task, except those whose results are in the journal.

    Args:
        trace: the trace.
        tasks: the tasks to replay.
        replayer: runs one task.
        read: makes a result from the output of `asdict`.
        is_complete: tells whether a result covers the whole trace. Only complete results go to the journal.
        jobs: largest number of processes; None means one for each core.
        keep: file of the journal, which keeps finished replays for the next call.
        advance: called with the number of requests done since the last call.
        should_stop: polled several times a second; once it returns True, no further replay starts.

    Returns:
        The results in the order of the tasks. If stopped, only those of replays that started.

    Raises:
        ConfigError: the journal cannot be read or written.
    """
    journal = FinishedReplays(keep, trace, read) if keep else None
    known = {task: journal.find(task) for task in tasks} if journal else {}
    done = {task: result for task, result in known.items() if result is not None}
    advance(len(trace) * len(done))
    left = [task for task in dict.fromkeys(tasks) if task not in done]
    processes = min(jobs or os.cpu_count() or 1, len(left), JOBS_MAX)
    results = (
        _in_pool(trace, left, replayer, processes, advance, should_stop)
        if processes > 1
        else _in_process(trace, left, replayer, advance, should_stop)
    )
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
    # The caller may have threads, so workers are spawned, not forked. Workers map the trace's columns from files.
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
    # Ctrl-C reaches every process of a terminal, but only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = (TraceArrays.load(Path(folder)), replayer, stops)


def _work(task: Any) -> Any:  # noqa: ANN401  types of the replayer
    assert _worker is not None, "the pool's initializer ran"
    trace, replayer, stops = _worker
    return None if stops.is_set() else replayer(trace, task, lambda _: None, stops.is_set)


class FinishedReplays(Generic[ResultT]):
    """Finished replays of one trace, in a file of JSON lines. Lines of other traces and versions are ignored.

    Args:
        path: the file, which is created with the first result.
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
                raise ConfigError(f"--keep {str(path)!r} is too large; allowed: at most {JOURNAL_BYTES_MAX} bytes")
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--keep {str(path)!r} cannot be read: {error}") from error
        # Text after the last line end is a result whose writing was interrupted. That replay runs again.
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
        """Return the result of `task`. The `repr` of a task identifies it."""
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
