"""Calls of an object store, in threads, for a scheduler that must not wait: lookups, and jobs that store or load.

lookups  The scheduler asks for each key of a waiting request in each step, until the answer is there. A thread gets the
         keys of a step together. An answer holds until its request ends, except that an object which failed to load
         becomes a miss: otherwise the scheduler would load it again and again.
jobs     The scheduler reuses a job's memory as soon as it has the job's result. `ObjectStore` copies in the thread that
         calls it and never after the call, so a result is there only after the last access. Every job ends by its
         deadline, because every job before it does; so does every lookup.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier
from typing import Any, NamedTuple

from kvtier.connect.vllm.vllm_types import TransferJob
from kvtier.runtime.object_store import ObjectBytes, ObjectId, ObjectStore
from kvtier.types import Outcome

FINDS, LOADS, STORES = range(3)
THREADS = (2, 4, 2)

KEYS_MAX = 1 << 16
"""Most keys of one request. Further keys are misses."""

BATCHES_MAX = 256
"""Most batches of keys without an answer. The keys of further batches are misses."""

JOBS_MAX = 1024
"""Most jobs without a result. Further jobs fail at once."""

START_S = 10.0
"""How long a thread waits for the others to start."""

CANCEL_S = 0.05
"""Interval at which calls are canceled until none is left: storing an object takes two calls."""

COPIES_S = 30.0
"""Longest wait for copies from memory to memory, after everything else was canceled."""


class _Batch(NamedTuple):
    """Keys of a request in one KV group, in the order of the questions."""

    answers: dict[bytes, bool | None]
    """The request's."""
    keys: list[bytes]
    objects: list[ObjectId]
    is_prefix: bool
    until_s: float


class Done(NamedTuple):
    """A job that has ended. Nothing accesses its memory any more."""

    job: TransferJob
    keys: Sequence[bytes] = ()
    """Of the objects that were stored or loaded."""
    seconds: float = 0.0


class Calls:
    """Lookups and jobs. Not thread-safe. Only `drain` and `close` wait.

    Args:
        store: the tiers; None: all lookups are misses, and all jobs fail.
        answer_s: deadline of a lookup in seconds; a key without an answer by then is a miss.
        guarded: the result of its first argument, called in a thread; or the second argument, when that fails.

    Raises:
        RuntimeError: the system cannot start a thread.
    """

    def __init__(
        self, store: ObjectStore | None, answer_s: float, guarded: Callable[[Callable[[], Any], Any], Any]
    ) -> None:
        self._store = store
        self._answer_s = answer_s
        self._guarded = guarded
        self._answers: dict[str, dict[bytes, bool | None]] = {}
        """By request: whether a key is there. Threads replace None."""
        self._batches: dict[tuple[str, bytes], _Batch] = {}
        """Of this step, by request and group."""
        self._finds: list[Future[None]] = []
        self._jobs: dict[Future[Done], TransferJob] = {}
        """Jobs whose results were not taken."""
        self._pools = [ThreadPoolExecutor(count, "kvtier tiering") for count in THREADS]
        all_are_there = Barrier(sum(THREADS))
        try:
            # All threads now: a pool starts one in `submit`, which would raise into vLLM's step if the system has none.
            for pool, count in zip(self._pools, THREADS, strict=True):
                for _ in range(count):
                    pool.submit(all_are_there.wait, START_S)
        except RuntimeError:
            all_are_there.abort()
            for pool in self._pools:
                pool.shutdown()
            raise

    # ---- lookups ---------------------------------------------------------------------------------------------------

    def ask(self, request: str, key: bytes, name: Callable[[], ObjectId], *, is_prefix: bool) -> bool | None:
        """Whether the tiers hold an object; None: not known yet.

        Args:
            request: whose key.
            key: vLLM's; its last four bytes are the KV group.
            name: of the object.
            is_prefix: the keys of this group are asked in the order of the prefix, and count up to the first miss.
        """
        answers = self._answers.setdefault(request, {})
        if key in answers:
            return answers[key]
        if self._store is None or len(answers) >= KEYS_MAX:
            return False
        until_s = time.monotonic() + self._answer_s
        batch = self._batches.setdefault((request, key[-4:]), _Batch(answers, [], [], is_prefix, until_s))
        batch.keys.append(key)
        batch.objects.append(name())
        answers[key] = None
        return None

    def flush(self) -> None:
        """End a step: pass its questions to a thread."""
        self._finds = [future for future in self._finds if not future.done()]
        for batch in self._batches.values():
            if len(self._finds) < BATCHES_MAX:
                self._finds.append(self._pools[FINDS].submit(self._find, batch))
            else:
                batch.answers.update(dict.fromkeys(batch.keys, False))
        self._batches.clear()

    def miss(self, request: str, keys: Iterable[bytes]) -> None:
        """The request could not load these."""
        self._answers.get(request, {}).update(dict.fromkeys(keys, False))

    def forget(self, request: str) -> None:
        """The request has ended."""
        self._answers.pop(request, None)

    def _find(self, batch: _Batch) -> None:
        found = self._guarded(lambda: self._found(batch, batch.until_s - time.monotonic()), [False] * len(batch.keys))
        batch.answers.update(zip(batch.keys, found, strict=True))

    def _found(self, batch: _Batch, left_s: float) -> list[bool]:
        assert self._store is not None
        if not batch.is_prefix:
            return self._store.contains(batch.objects, left_s)
        run = self._store.leading_run(batch.objects, left_s)
        return [at < run for at in range(len(batch.keys))]

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def submit(self, job: TransferJob, items: Sequence[ObjectBytes], until_s: float) -> None:
        """Queue a job. It fails at once without items or a store, and with too many before it.

        Args:
            job: vLLM's.
            items: one for each of its keys; or none.
            until_s: deadline, `time.monotonic`.
        """
        if self._store is not None and items and len(self._jobs) < JOBS_MAX:
            call, pool = (
                (self._store.get_into, self._pools[LOADS])
                if job.is_promotion
                else (self._store.put_from, self._pools[STORES])
            )
            future = pool.submit(self._run, job, lambda left_s: call(items, left_s), until_s)
        else:
            future = Future[Done]()
            future.set_result(Done(job))
        self._jobs[future] = job

    def finished(self) -> list[Done]:
        """Jobs that have ended since the last call."""
        ended = [(future, job) for future, job in self._jobs.items() if future.done()]
        for future, _ in ended:
            del self._jobs[future]
        return [Done(job) if future.cancelled() else future.result(0.0) for future, job in ended]

    def _run(self, job: TransferJob, call: Callable[[float], list[Outcome]], until_s: float) -> Done:
        began_s = time.monotonic()
        outcomes = self._guarded(lambda: call(until_s - began_s), [])
        keys = [key for key, outcome in zip(job.keys, outcomes, strict=False) if outcome is Outcome.DONE]
        return Done(job, keys, time.monotonic() - began_s)

    def drain(self, patience_s: float) -> None:
        """End all jobs and forget all answers. Jobs that wait fail; others are canceled after `patience_s` seconds.

        Raises:
            TimeoutError: a copy has not ended after `COPIES_S` more, so a job still accesses its memory.
        """
        self._answers.clear()
        self._batches.clear()
        for future in self._jobs:
            future.cancel()
        running: set[Future[Done]] = wait(self._jobs, patience_s).not_done
        until_s = time.monotonic() + COPIES_S
        while running and self._store is not None:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{len(running)} transfers have not ended {COPIES_S:g} s after they were canceled")
            self._store.cancel()
            running = wait(running, CANCEL_S).not_done

    def close(self, patience_s: float) -> None:
        """Give jobs `patience_s` seconds to end, cancel the others, and end the threads.

        Raises:
            TimeoutError: see `drain`.
        """
        wait(self._jobs, patience_s)
        self.drain(0.0)
        self._jobs.clear()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
