"""Which objects the tiers hold, for vLLM's scheduler, which must not wait for the answer.

The scheduler asks for each key of a waiting request in each step, until the answer is there. A thread gets the keys of
a step together. An answer holds for its request until the request ends, except that an object which failed to load
becomes a miss: otherwise the scheduler would load it again and again.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import NamedTuple

from kvtier.runtime.object_store import ObjectId, ObjectStore

THREADS = 2

KEYS_MAX = 1 << 16
"""Most keys of one request. Further keys are misses."""

BATCHES_MAX = 256
"""Most batches that wait for a thread; the keys of further batches are misses."""

IDLE_WAIT_S = 60.0
"""An idle thread looks for batches at this interval, so that a lost wake-up cannot stall it."""


class _Batch(NamedTuple):
    """Keys of a request in one KV group, in the order of the questions."""

    answers: dict[bytes, bool | float]
    """The request's."""
    keys: list[bytes]
    objects: list[ObjectId]
    is_prefix: bool
    """Only the keys before the first miss count."""
    until_s: float


class Lookups:
    """Answers by request and key. Used by the scheduler's thread; in vLLM 0.33 by others under the manager's lock.

    Args:
        store: the tiers.
        deadline_s: of an answer; a key without an answer by then is a miss.
        failed: called in a thread with an exception that the store should not have raised.

    Raises:
        RuntimeError: the system cannot start a thread.
    """

    def __init__(self, store: ObjectStore, deadline_s: float, failed: Callable[[BaseException], None]) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._failed = failed
        self._answers: dict[str, dict[bytes, bool | float]] = {}
        """Whether a key is there, or the deadline of the answer. Threads replace deadlines."""
        self._batches: dict[tuple[str, bool, bytes], _Batch] = {}
        """Of this step, by request and group."""
        self._asked: Queue[_Batch] = Queue(BATCHES_MAX)
        self._is_over = False
        for _ in range(THREADS):
            threading.Thread(target=self._serve, name="kvtier lookup", daemon=True).start()

    def ask(self, request: str, key: bytes, name: Callable[[], ObjectId], *, is_prefix: bool) -> bool | None:
        """Whether the tiers hold an object; None: not known yet.

        Args:
            request: whose key.
            key: vLLM's; its last four bytes are the KV group.
            name: of the object.
            is_prefix: the keys of this group are asked in the order of the prefix, and count up to the first miss.
        """
        answers = self._answers.setdefault(request, {})
        found = answers.get(key)
        if found is None:
            if len(answers) >= KEYS_MAX:
                return False
            answers[key] = until_s = time.monotonic() + self._deadline_s
            place = (request, is_prefix, key[-4:])
            if place not in self._batches:
                self._batches[place] = _Batch(answers, [], [], is_prefix, until_s)
            self._batches[place].keys.append(key)
            self._batches[place].objects.append(name())
            return None
        if not isinstance(found, bool) and time.monotonic() > found:
            answers[key] = found = False
        return found if isinstance(found, bool) else None

    def flush(self) -> None:
        """End a step: pass its questions to the threads."""
        for batch in self._batches.values():
            try:
                self._asked.put_nowait(batch)
            except Full:
                batch.answers.update(dict.fromkeys(batch.keys, False))
        self._batches.clear()

    def miss(self, request: str, keys: Iterable[bytes]) -> None:
        """The request could not load these."""
        if request in self._answers:
            self._answers[request].update(dict.fromkeys(keys, False))

    def forget(self, request: str) -> None:
        """The request has ended."""
        self._answers.pop(request, None)

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()
        self._batches.clear()

    def close(self) -> None:
        """End the threads, without waiting for them."""
        self._is_over = True
        with suppress(Full):  # then the threads are awake
            for _ in range(THREADS):
                self._asked.put_nowait(_Batch({}, [], [], is_prefix=False, until_s=0.0))

    def _serve(self) -> None:
        while not self._is_over:
            with suppress(Empty):
                batch = self._asked.get(timeout=IDLE_WAIT_S)
                batch.answers.update(zip(batch.keys, self._found(batch), strict=True))

    def _found(self, batch: _Batch) -> Sequence[bool]:
        left_s = batch.until_s - time.monotonic()
        try:
            if not batch.is_prefix:
                return self._store.contains(batch.objects, left_s)
            run = self._store.leading_run(batch.objects, left_s)
        except Exception as error:  # noqa: BLE001 - the scheduler needs an answer
            self._failed(error)
            run = 0
        return [at < run for at in range(len(batch.keys))]
