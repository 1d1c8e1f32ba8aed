"""Calls an object store in threads, for a scheduler that must not wait: lookups, and jobs that store or load.

lookups  The scheduler asks for each key of a waiting request in each step, until it has the answer. A thread
         looks up all keys of a step together. An answer is valid until its request ends, with one exception: an object
         that failed to load becomes a miss, because the scheduler would otherwise load it repeatedly.
jobs     The scheduler reuses a job's memory as soon as it has the job's result. `ObjectStore` copies in the thread that
         calls it and never after the call, so a result exists only after the last access. Every job ends by its
         deadline, even if it waits for a thread, because the jobs before it end by theirs. So does every lookup.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier
from typing import Any, NamedTuple

from kvtier.connect.vllm.vllm_types import TransferJob
from kvtier.runtime.tiered_object_store import ObjectBytes, ObjectId, ObjectStore
from kvtier.types import Outcome

FINDS, LOADS, STORES = range(3)
THREADS = (2, 4, 2)

KEYS_MAX = 1 << 16
"""Maximum number of keys per request. Further keys are misses."""

BATCHES_MAX = 256
"""Maximum number of batches of keys that wait for an answer. The keys of further batches are misses."""

JOBS_MAX = 1024
"""Maximum number of jobs that wait for a result. Further jobs fail immediately."""

START_S = 10.0
"""Seconds that a thread waits for the others to start."""

CANCEL_S = 0.05
"""Seconds between attempts to cancel calls until none is left. One attempt may not suffice, because storing an object
takes two calls."""

COPIES_S = 30.0
"""Maximum seconds to wait for memory-to-memory copies once everything else is canceled."""


class _Batch(NamedTuple):
    """Keys of a request in one KV group, in the order in which vLLM asked for them."""

    answers: dict[bytes, bool | None]
    """All answers of the request."""
    keys: list[bytes]
    objects: list[ObjectId]
    is_prefix: bool
    until_s: float


class Done(NamedTuple):
    """A job that has ended. Nothing accesses its memory any more."""

    job: TransferJob
    keys: Sequence[bytes] = ()
    """Keys of the objects stored or loaded."""
    seconds: float = 0.0


class Calls:
    """Runs lookups and jobs. Not thread-safe. Only `drain` and `close` wait.

    Args:
        store: the tiers. If None, all lookups are misses and all jobs fail.
        answer_s: deadline of a lookup in seconds; a key without an answer by then is a miss.
        guarded: calls its first argument in a thread and returns the result, or the second argument after an error.

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
        """Whether each key is stored, by request. Threads replace None with the answer."""
        self._batches: dict[tuple[str, bytes], _Batch] = {}
        """The batches of this step, by request and group."""
        self._finds: list[Future[None]] = []
        self._jobs: dict[Future[Done], TransferJob] = {}
        """Jobs whose results have not been taken."""
        self._pools = [ThreadPoolExecutor(count, "kvtier tiering") for count in THREADS]
        all_are_there = Barrier(sum(THREADS))
        try:
            # Start all threads now. A pool would start them in `submit`, where a failure would raise into vLLM's step.
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
        """Return whether the tiers hold an object, or None if this is not known yet.

        Args:
            request: id of the request.
            key: vLLM's key; its last four bytes are the KV group.
            name: returns the object's name.
            is_prefix: whether vLLM asks for keys of this group in prefix order. Then all keys after a miss are misses.
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
        """End a step: pass its lookups to a thread."""
        self._finds = [future for future in self._finds if not future.done()]
        for batch in self._batches.values():
            if len(self._finds) < BATCHES_MAX:
                self._finds.append(self._pools[FINDS].submit(self._find, batch))
            else:
                batch.answers.update(dict.fromkeys(batch.keys, False))
        self._batches.clear()

    def miss(self, request: str, keys: Iterable[bytes]) -> None:
        """Turn these keys into misses, because the request could not load them."""
        self._answers.get(request, {}).update(dict.fromkeys(keys, False))

    def forget(self, request: str) -> None:
        """Drop the answers of a request that has ended."""
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
        """Queue a job. It fails immediately if there are no items or no store, or if too many jobs wait.

        Args:
            job: vLLM's job.
            items: one object for each of its keys, or none.
            until_s: deadline on the clock of `time.monotonic`.
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
        """Return the jobs that ended since the last call. A failed load comes after the other loads of its request.

        After a failed load vLLM computes the request, and stores no key that another of its loads still transfers. If
        that load then found a damaged object, nothing would replace it.
        """
        loading = {_loads_for(job) for future, job in self._jobs.items() if not future.done()} - {None}
        finished: list[Done] = []
        for future, job in [it for it in self._jobs.items() if it[0].done()]:
            done = Done(job) if future.cancelled() else future.result(0.0)
            if len(done.keys) == len(job.keys) or _loads_for(job) not in loading:
                del self._jobs[future]
                finished.append(done)
        return finished

    def _run(self, job: TransferJob, call: Callable[[float], list[Outcome]], until_s: float) -> Done:
        began_s = time.monotonic()
        outcomes = self._guarded(lambda: call(until_s - began_s), [])
        keys = [key for key, outcome in zip(job.keys, outcomes, strict=False) if outcome is Outcome.DONE]
        return Done(job, keys, time.monotonic() - began_s)

    def drain(self, patience_s: float) -> None:
        """End all jobs and forget all answers. Waiting jobs fail; running ones are canceled after `patience_s` seconds.

        Raises:
            TimeoutError: a copy has not ended after another `COPIES_S`, so a job still accesses its memory.
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
        """Give jobs `patience_s` seconds to end, cancel the rest, and end the threads.

        Raises:
            TimeoutError: as in `drain`.
        """
        wait(self._jobs, patience_s)
        self.drain(0.0)
        self._jobs.clear()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


def _loads_for(job: TransferJob) -> str | None:
    """Return the request for which a job loads; None if it stores."""
    return job.req_context.req_id if job.is_promotion else None
