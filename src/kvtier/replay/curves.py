"""Many replays of one trace: policies by capacities, on several processes, with what is done kept in a file."""

import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from kvtier.errors import ConfigError
from kvtier.replay.cost import Prefill
from kvtier.replay.hits import Outcome, capacity_blocks, replay
from kvtier.replay.policies.registry import make_policy
from kvtier.trace.packed import Packed

JOBS_MAX = 256
_POLL_S = 0.25
_HASH_STEP = 1 << 22


class Task(NamedTuple):
    """One replay."""

    policy: str
    capacity_tokens: int | None


class Journal:
    """Outcomes in a file of JSON lines, so that a run that was broken off goes on where it stood.

    Args:
        path: the file; made when the first outcome is there.
        packed: the trace; outcomes of others in the same file are left alone.
        prefill: as the replays are given it; it belongs to what an outcome is of.

    Raises:
        ConfigError: the file cannot be read or is no journal.
    """

    def __init__(self, path: Path, packed: Packed, prefill: Prefill) -> None:
        self._path = path
        self._trace = _digest(packed, prefill)
        self.done: dict[Task, Outcome] = {}
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--keep {str(path)!r} cannot be read: {error}") from error
        lines = text.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n") and number == len(lines):
                break  # cut short when the run was broken off: that replay is done again
            try:
                entry: dict[str, Any] = json.loads(line)
                if entry.pop("trace") == self._trace:
                    outcome = Outcome(**entry)
                    self.done[Task(outcome.policy, outcome.capacity_tokens)] = outcome
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"--keep {str(path)!r}, line {number}: not made by `kvtier replay`: {error}"
                ) from error
        self._whole_bytes = len("".join(it for it in lines if it.endswith("\n")).encode())
        self._is_cut = bool(lines) and not lines[-1].endswith("\n")

    def add(self, outcome: Outcome) -> None:
        """Keep one.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            if self._is_cut:
                os.truncate(self._path, self._whole_bytes)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(f"{json.dumps({'trace': self._trace, **asdict(outcome)})}\n")
        except OSError as error:
            raise ConfigError(f"--keep {str(self._path)!r} cannot be written: {error.strerror or error}") from error
        self._is_cut = False


def _digest(packed: Packed, prefill: Prefill) -> str:
    hasher = xxhash.xxh3_128(repr((packed.block_tokens, prefill)).encode())
    for column in (packed.ids, packed.starts, packed.time_s, packed.input_tokens, packed.session):
        for start in range(0, len(column), _HASH_STEP):
            hasher.update(column[start : start + _HASH_STEP].tobytes())
    return hasher.hexdigest()


def sweep(
    packed: Packed,
    tasks: Sequence[Task],
    *,
    prefill: Prefill | None = None,
    jobs: int | None = None,
    journal: Journal | None = None,
    advance: Callable[[int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Replay a trace for each task.

    Args:
        packed: the trace.
        tasks: what to replay; checked before anything runs.
        prefill: what a hit saves, for policies that ask.
        jobs: processes at most; None takes one for each core.
        journal: what is done already, and where to keep what gets done.
        advance: told of requests that are done.
        should_stop: asked several times a second; once it says so, what is under way is given up.

    Returns:
        An outcome for each task, in their order; of those that were done, if it was stopped.

    Raises:
        ConfigError: a task is not possible.
    """
    prefill = prefill or Prefill()
    done: dict[Task, Outcome] = dict(journal.done) if journal else {}
    for task in tasks:
        capacity_blocks(packed, task.capacity_tokens)
    for policy in {task.policy for task in tasks}:
        make_policy(policy, 1, _empty(packed), prefill)
    open_tasks = list(dict.fromkeys(task for task in tasks if task not in done))
    if advance:
        advance(len(packed) * (len(set(tasks)) - len(open_tasks)))
    count = min(jobs or os.cpu_count() or 1, len(open_tasks), JOBS_MAX)
    made = (
        _here(packed, open_tasks, prefill, advance, should_stop)
        if count <= 1
        else _apart(packed, open_tasks, prefill, count, should_stop)
    )
    for outcome in made:
        done[Task(outcome.policy, outcome.capacity_tokens)] = outcome
        if journal:
            journal.add(outcome)
        if advance and count > 1:
            advance(len(packed))
    return [done[task] for task in tasks if task in done]


class _StoppedError(Exception):
    """Leaves a replay that is under way."""


def _here(
    packed: Packed,
    tasks: list[Task],
    prefill: Prefill,
    advance: Callable[[int], None] | None,
    should_stop: Callable[[], bool],
) -> Iterator[Outcome]:
    def go_on(requests: int) -> None:
        if should_stop():
            raise _StoppedError
        if advance:
            advance(requests)

    for task in tasks:
        try:
            yield replay(packed, task.policy, task.capacity_tokens, prefill=prefill, advance=go_on)
        except _StoppedError:
            return


def _apart(
    packed: Packed, tasks: list[Task], prefill: Prefill, count: int, should_stop: Callable[[], bool]
) -> Iterator[Outcome]:
    # Spawned, not forked: whoever calls us may have threads. They map the trace's columns from files.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvtier-replay-") as folder:
        packed.save(Path(folder))
        ends = context.Event()
        pool = ProcessPoolExecutor(count, context, _begin, (folder, prefill, ends))
        try:
            waiting: set[Future[Outcome]] = {pool.submit(_work, task) for task in tasks}
            while waiting and not should_stop():
                finished, waiting = wait(waiting, _POLL_S, FIRST_COMPLETED)
                for future in finished:
                    yield future.result(timeout=0)
        finally:
            ends.set()
            pool.shutdown(cancel_futures=True)


_worker: tuple[Packed, Prefill, Event] | None = None


def _begin(folder: str, prefill: Prefill, ends: Event) -> None:
    global _worker  # noqa: PLW0603  one trace for each process of the pool
    # Ctrl-C reaches every process of a terminal; who started this one says when it is to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = (Packed.load(Path(folder)), prefill, ends)


def _work(task: Task) -> Outcome:
    assert _worker is not None, "the pool's initializer ran"
    packed, prefill, ends = _worker

    def go_on(_requests: int) -> None:
        if ends.is_set():
            raise _StoppedError

    return replay(packed, task.policy, task.capacity_tokens, prefill=prefill, advance=go_on)


def _empty(packed: Packed) -> Packed:
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
        parents=packed.parents[:0],
    )
