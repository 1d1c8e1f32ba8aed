r"""The mover: executes commands in worker queues and completes each exactly once. It has no policy and no index.

    device queue     gather, scatter      scatters first, because requests wait for them
    read queue       promote             \
    write queue      demote, drop, tell   } one of each per tier, so that a slow write or a tier that
    probe queue      probe               /  hangs delays no other work
    no queue         recall               completed immediately; a separate thread per tier reads

The mover owns the slot that a command names until the command is completed. So it completes a command only when no
thread, not even one of a tier (`tier/buffer_loans.py`), uses the slot any more. By then the deadline may be long
past.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from kvtier.errors import CorruptChunkError, NoRoomError, UnreadableChunkError, described
from kvtier.runtime.command_runner import NOT_ADMITTED, CommandRunner, Result
from kvtier.runtime.deferred_tier import NOT_OPEN
from kvtier.runtime.executor import COUNT_MAX, Completing, Completion, Job, Threads, TierView, Work
from kvtier.runtime.observers.fault_log import FaultLog
from kvtier.runtime.protocol import Note
from kvtier.runtime.worker_queues import STUCK_S, Scratch, WorkerQueue
from kvtier.tier.base import Figures, Tier
from kvtier.tier.files.full_disk import FULL, is_full_error
from kvtier.types import WRITE_KINDS, Cancel, ChunkKey, Command, Direction, Drop, Outcome, Probe, Recall, Tell, Transfer

QUEUE_BOUND = 1 << 16
"""Maximum number of jobs waiting in one queue. The core's limits are far lower, so reaching it is a bug in kvtier."""

DROPS_BOUND = 1024
"""Number of waiting jobs at which a write queue refuses drops and tells. The core does not limit these, and losing one
costs only hits."""

_Object = tuple[str, ChunkKey, int]
"""(tier, key, group)."""

FIGURES_EVERY_S = 1.0
"""Interval at which a tier's figures are read."""

logger = logging.getLogger(__name__)

_UNLOGGED = (NOT_ADMITTED, NOT_OPEN)
"""A failed command whose detail ends like this is expected. Such failures are logged elsewhere, if at all."""

SHORT_S = 200e-6
READY_MOST = 8
"""Up to this many completions of jobs shorter than `SHORT_S` are announced together while more jobs wait. The core
handles them all at the cost of one. The session's thread finds them at its next tick if the next job hangs."""

TOO_LATE = "too late to begin"
CANCELLED = "cancelled"
CLOSED = "the mover is closed"


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    """The worker queue for one kind of command."""

    queue: WorkerQueue
    bound: int
    is_urgent: bool = False


class FiguresSampler:
    """Copies a tier's figures to its view. Runs in the tier's threads, one at a time."""

    def __init__(self, tier: Tier, view: TierView) -> None:
        self._tier = tier
        self._view = view
        self._is_taken = threading.Lock()
        self.next_s = -math.inf

    def sample(self, now_s: float) -> None:
        """Update the view, unless it was updated within `FIGURES_EVERY_S` or another thread is doing so."""
        if now_s < self.next_s or not self._is_taken.acquire(blocking=False):
            return
        try:
            self.next_s = now_s + FIGURES_EVERY_S
            tier, view = self._tier, self._view
            if view.is_up is not None:
                tier.note_use(is_up=view.is_up)
            view.figures = _checked(tier.figures())
        except Exception as error:  # noqa: BLE001 - the view keeps its figures; the transfers of a broken tier fail
            logger.debug("cannot read the figures of tier %s: %s", self._tier.name, error)
        finally:
            self._is_taken.release()


def _checked(figures: Figures) -> Figures:
    """Convert a tier's figures to plain values that the session can use. The tier may be from another package.

    Raises:
        TypeError, ValueError, AttributeError: `figures` is not a valid `Figures`.
    """
    used_bytes, capacity_bytes, evictions = (
        None if count is None else _count(count)
        for count in (figures.used_bytes, figures.capacity_bytes, figures.evictions)
    )
    written = {what: _count(count) for what, count in figures.write_bytes.items() if what in WRITE_KINDS}
    return Figures(used_bytes, capacity_bytes, evictions, written)


def _count(figure: int) -> int:
    """Clamp `figure` to a count that metrics can represent."""
    return min(max(0, int(figure)), COUNT_MAX)


class Mover(Completing):
    """The `Executor` of one rank in this process.

    Args:
        runner: does the work of each command, in the mover's threads.
        threads: number of threads per queue.
        tier_threads: numbers of threads for individual tiers, by name.

    Only one thread may call `close`; any thread may call the other methods. The daemon threads start immediately.

    Small objects that wait for a tier are written and read in batches if the tier `takes_batches`.

    Raises:
        RuntimeError: the system cannot start a thread.
    """

    needs_flush = False
    lost = ""
    """Always empty, since a rank in this process is never lost."""

    def __init__(
        self,
        runner: CommandRunner,
        *,
        threads: Threads | None = None,
        tier_threads: Mapping[str, Threads] = MappingProxyType({}),
    ) -> None:
        threads = threads or Threads()
        self._runner = runner
        self._clock = runner.clock
        self._tiers = tiers = runner.tiers
        self._process = os.getpid()
        self._unready = 0
        """Approximate number of completions since the last `_ready`."""
        self.on_note: Callable[[Note], None] = lambda _note: None
        self._on_leaving: Callable[[], None] = lambda: None
        self._closed = threading.Event()
        self._faults = FaultLog()
        self._dropping: dict[_Object, Job] = {}
        """Drops that are not yet completed."""
        self._stuck: set[str] = set()
        """Names of stuck queues whose warning has been logged."""
        self.next_stuck_check_s = -math.inf
        device = self._queue("device", threads.device)
        of = {name: tier_threads.get(name, threads) for name in tiers}
        reads = {name: self._queue(f"{name} read", of[name].read) for name in tiers}
        writes = {name: self._queue(f"{name} write", of[name].write) for name in tiers}
        probes = {name: self._queue(f"{name} probe", of[name].probe) for name in tiers}
        self._reads = reads.values()
        self._queues = [device, *self._reads, *writes.values(), *probes.values()]
        self.views = {name: TierView() for name in tiers}
        """Each tier's figures, for the session."""
        self._samplers = {name: FiguresSampler(tier, self.views[name]) for name, tier in tiers.items()}
        for name, view in self.views.items():
            view.stuck_queues = partial(_stuck, (reads[name], writes[name], probes[name]))
        self._routes: dict[tuple[Direction | type, str], _Route] = {
            (Direction.GATHER, ""): _Route(device, QUEUE_BOUND),
            (Direction.SCATTER, ""): _Route(device, QUEUE_BOUND, is_urgent=True),
        }
        """Queues of transfers by direction and tier, and of other commands by type and tier."""
        for name in tiers:
            self._routes[Direction.PROMOTE, name] = _Route(reads[name], QUEUE_BOUND)
            self._routes[Direction.DEMOTE, name] = _Route(writes[name], QUEUE_BOUND)
            self._routes[Probe, name] = _Route(probes[name], QUEUE_BOUND)
            self._routes[Drop, name] = self._routes[Tell, name] = _Route(writes[name], DROPS_BOUND)
        try:
            for queue in self._queues:
                queue.start()
        except RuntimeError:
            self.close(deadline_s=1.0)
            raise

    def submit(self, *commands: Command) -> None:
        """Queue `commands`, in order. Consecutive transfers and probes lock each queue only once.

        Raises:
            ValueError: a command names an unknown tier. The commands after it are not queued.
        """
        now_s = self._clock()
        tiers, together = self._tiers, self._runner.together
        bursts: dict[_Route, list[Job]] = {}
        try:
            for command in commands:
                if isinstance(command, Transfer | Probe):
                    is_batched = not command.tier or (command.tier in tiers and tiers[command.tier].takes_batches)
                    job = Job(command, now_s, together(command) if is_batched else 1)
                    if self._dropping and isinstance(command, Transfer) and command.direction is Direction.DEMOTE:
                        drop = self._dropping.get((command.tier, command.key, command.group))
                        job.after = None if drop is None else drop.over
                    what = command.direction if isinstance(command, Transfer) else Probe
                    route = self._routes.get((what, command.tier)) or self._route(command)  # inline: it runs per object
                    bursts.setdefault(route, []).append(job)
                    continue
                self._begin(bursts, now_s)  # the command may refer to an earlier one
                if isinstance(command, Cancel):
                    self._cancel(frozenset(command.ids))
                    continue
                if isinstance(command, Recall):
                    self._recall(command)
                    continue
                job = Job(command, now_s)
                if isinstance(command, Drop):
                    job.over = threading.Event()
                    first = self._dropping.setdefault((command.tier, command.key, command.group), job)
                    if first is not job:  # writes of the object wait for the first drop, so one is enough
                        self._answer(job, Outcome.CANCELLED, "another command that drops the object is waiting")
                        continue
                self._begin({self._route(command): [job]}, now_s)
        finally:
            self._begin(bursts, now_s)

    def flush(self) -> bool:
        """Return True, because nothing is queued for other processes.

        About once a second, relieve read queues (`WorkerQueue.relieve`) and log warnings about stuck queues.
        """
        now_s = self._clock()
        if now_s >= self.next_stuck_check_s:
            self.next_stuck_check_s = now_s + FIGURES_EVERY_S
            for queue in self._reads:  # a single read may hang; a probe or write hangs only with the whole tier
                queue.relieve()
            self._warn_of_stuck_queues()
        return True

    def send_note(self, note: Note) -> None:
        """Pass `note` to this rank's engine adapter, in the calling thread."""
        self.on_note(note)

    def when_leaving(self, act: Callable[[], None]) -> None:
        """Call `act` in `leave`, before this process ends. `act` must be quick."""
        self._on_leaving = act

    def leave(self, deadline_s: float) -> bool:
        """Announce that this process is about to end. Return whether `close` is called within `deadline_s` seconds."""
        self._on_leaving()
        return self._closed.wait(deadline_s)

    def close(self, deadline_s: float) -> bool:
        """Accept no more commands, cancel those that have not started, and wait for the others. Idempotent.

        It does nothing in a forked child, because threads are not inherited.

        Args:
            deadline_s: longest time to wait.

        Returns:
            Whether all threads have ended. A thread that hangs in a tier or the device completes its jobs when it
            returns. It keeps its memory until then, but does not block the exit of the process.
        """
        if self._process != os.getpid():  # before any lock, which a fork may leave held
            return True
        until_s = time.monotonic() + deadline_s
        self._runner.closing.set()
        try:
            for queue in self._queues:
                for job in queue.close():
                    self._answer(job, Outcome.CANCELLED, CLOSED)
            ended = [queue.join(until_s) for queue in self._queues]
            return all(ended)
        finally:
            self._closed.set()

    def _recall(self, command: Recall) -> None:
        is_closed = self._runner.closing.is_set()
        closed = Completion(command, Outcome.CANCELLED, detail=CLOSED)
        try:
            answer = closed if is_closed else self._runner.recall(command)
        except Exception as error:  # noqa: BLE001 - the caller holds the session's lock, and a recall is optional
            answer = Completion(command, Outcome.FAILED, detail=described(error))
        self._put(answer)
        self._ready()

    def _cancel(self, ids: frozenset[int]) -> None:
        for queue in self._queues:
            for job in queue.withdraw(ids):
                self._answer(job, Outcome.CANCELLED, CANCELLED)

    def _queue(self, name: str, threads: int) -> WorkerQueue:
        return WorkerQueue(name, threads=threads, run=self._run, clock=self._clock)

    def _route(self, command: Work) -> "_Route":
        try:
            return self._routes[command.direction if isinstance(command, Transfer) else type(command), command.tier]
        except KeyError:
            raise ValueError(
                f"there is no tier {command.tier!r}; the tiers are {', '.join(self._tiers) or 'none'}"
            ) from None

    def _begin(self, bursts: dict["_Route", list[Job]], now_s: float) -> None:
        """Queue the jobs of `bursts`, and complete those that their queues do not accept."""
        while bursts:
            route, jobs = bursts.popitem()
            queue = route.queue
            if queue.jobs or queue.urgent_jobs:
                for job in queue.expire(now_s):
                    self._answer_too_late(job)
            queued = queue.add(jobs, bound=route.bound, is_urgent=route.is_urgent)
            if queued == len(jobs):
                continue
            jobs = jobs[queued:]
            if not queue.is_open:
                for job in jobs:
                    self._answer(job, Outcome.CANCELLED, CLOSED)
                continue
            for job in jobs:
                self._answer(job, Outcome.FAILED, f"{route.bound} commands already wait in the {queue.name} queue")
            is_bug = any(not isinstance(job.command, Drop | Tell) for job in jobs)
            assert not is_bug, f"the core has let {route.bound} commands wait in the {queue.name} queue"

    def _warn_of_stuck_queues(self) -> None:
        """Log a warning for each queue that has become stuck."""
        before, self._stuck = self._stuck, {queue.name for queue in self._queues if queue.is_stuck}
        for name in self._stuck - before:
            logger.warning("the %s queue is stuck: all of its threads have been in a call for %g s", name, STUCK_S)

    def _run(self, jobs: list[Job], scratch: Scratch) -> None:
        """Execute jobs and complete each of them, even after an error. Runs in the threads of a `WorkerQueue`."""
        try:
            began_s, left = self._clock(), jobs
            for job in jobs:
                if job.after is not None or began_s >= job.deadline_s:
                    began_s, left = self._begun(jobs)
                    break
            results: Sequence[Result | Exception] = []
            try:
                if left:
                    results = self._runner.run(left, scratch)
            except Exception as error:  # noqa: BLE001 - any error of a tier, codec or copier is a miss
                results = [error] * len(left)
            self._complete(left, began_s, results)
        except BaseException as error:  # noqa: BLE001 - such as a panic in a Rust library
            self._fail(jobs, error)

    def _begun(self, jobs: list[Job]) -> tuple[float, list[Job]]:
        """Wait for drops that must end before these jobs. Complete late jobs. Return the time and the other jobs."""
        for job in jobs:
            if job.after is not None:
                job.after.wait(min(threading.TIMEOUT_MAX, max(0.0, job.deadline_s - self._clock())))
        began_s = self._clock()
        for job in jobs:
            if began_s >= job.deadline_s:
                self._answer_too_late(job)
        return began_s, [job for job in jobs if began_s < job.deadline_s]

    def _complete(self, jobs: list[Job], began_s: float, results: Sequence[Result | Exception]) -> None:
        """Complete `jobs`. Every error of a tier, codec or copier ends here."""
        if not jobs:
            return
        ended_s = self._clock()
        seconds = ended_s - began_s
        completions: list[Completion] = []
        faults: list[tuple[Work, Result]] = []
        for job, it in zip(jobs, results, strict=True):
            result = self._judged(job, it) if isinstance(it, Exception) else it
            command, (outcome, size_bytes, present, detail, reason) = job.command, result
            waited_s, is_fault = began_s - job.submitted_s, job.is_in_tier and outcome is Outcome.FAILED
            moved = (present, size_bytes, seconds, waited_s)
            completions.append(Completion(command, outcome, *moved, detail, is_fault, reason))
            is_bad = outcome is Outcome.CORRUPT or isinstance(it, UnreadableChunkError)
            if is_bad or (outcome is Outcome.FAILED and not detail.endswith(_UNLOGGED)):
                faults.append((command, result))
        for job, completion in zip(jobs, completions, strict=True):
            self._put(completion)
            job.is_answered = True
            if job.over is not None:  # the core must also see a waiting write end after the drop
                self._end_drop(job)
        first = jobs[0].command
        self._unready += len(jobs)
        has_more = False
        if seconds < SHORT_S and self._unready < READY_MOST and isinstance(first, Transfer):
            queue = self._routes[first.direction, first.tier].queue
            has_more = bool(queue.jobs or queue.urgent_jobs)
        if not has_more:
            self._unready = 0
            self._ready()
        for command, result in faults:
            self._faults.report(_kind(command, result.outcome), result.detail)
        if (sampler := self._samplers.get(jobs[0].command.tier)) and ended_s >= sampler.next_s:
            sampler.sample(ended_s)

    def _judged(self, job: Job, error: Exception) -> Result:
        """Turn an exception into a result. A write refused for lack of space is not a fault."""
        command = job.command
        direction = command.direction if isinstance(command, Transfer) else None
        if isinstance(error, CorruptChunkError):
            # Only a promotion reads stored bytes.
            outcome = Outcome.CORRUPT if direction is Direction.PROMOTE else Outcome.FAILED
            return Result(outcome, detail=str(error), reason=error.reason)
        if isinstance(error, UnreadableChunkError):  # only a promotion opens frames
            return Result(
                Outcome.ABSENT, detail=f"{error}; this is a miss, and the object is kept", reason=error.reason
            )
        detail = described(error)
        is_full = isinstance(error, NoRoomError) or is_full_error(error) or is_full_error(error.__cause__)
        if is_full and direction is Direction.DEMOTE:
            job.is_in_tier = False
            why = detail.removeprefix(f"tier {command.tier!r}: ")
            if not why.endswith(FULL):  # `EffectiveCap` has logged that one
                self._tiers[command.tier].refusals.refused(why)
            detail = f"{why}: {NOT_ADMITTED}"
        return Result(Outcome.FAILED, detail=detail)

    def _fail(self, jobs: list[Job], error: BaseException) -> None:
        """Complete the jobs that an error left open."""
        for job in jobs:
            if not job.is_answered:
                try:
                    self._answer(job, Outcome.FAILED, described(error), is_tier_fault=job.is_in_tier)
                except Exception:
                    logger.exception("internal error: a command of tier %r will never complete", job.command.tier)
        logger.error("internal error in the mover: %d commands have failed", len(jobs), exc_info=error)

    def _answer(self, job: Job, outcome: Outcome, detail: str, *, is_tier_fault: bool = False) -> None:
        """Complete a job that has not started."""
        waited_s = self._clock() - job.submitted_s
        completion = Completion(job.command, outcome, waited_s=waited_s, detail=detail, is_tier_fault=is_tier_fault)
        self._put(completion)
        job.is_answered = True
        if job.over is not None:
            self._end_drop(job)
        self._ready()

    def _end_drop(self, job: Job) -> None:
        """Release demotions that wait for this job, if it is a drop."""
        command = job.command
        if job.over is not None and isinstance(command, Drop):
            if self._dropping.get((command.tier, command.key, command.group)) is job:
                del self._dropping[command.tier, command.key, command.group]
            job.over.set()

    def _answer_too_late(self, job: Job) -> None:
        # A tier that delays a job past its deadline counts as failed. The device has no circuit breaker.
        self._answer(job, Outcome.FAILED, TOO_LATE, is_tier_fault=bool(job.command.tier))


def _stuck(queues: Sequence[WorkerQueue]) -> int:
    return sum(queue.is_stuck for queue in queues)


def _kind(command: Work, outcome: Outcome) -> str:
    """Name the kind of a fault for the log."""
    act = command.direction.value if isinstance(command, Transfer) else type(command).__name__.lower()
    return f"{act}{f' of tier {command.tier!r}' if command.tier else ''} {outcome.value}"
