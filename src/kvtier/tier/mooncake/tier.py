"""Keeps frames as objects of a Mooncake store: the memory of many nodes, and a master that knows where objects are.

An object's key is ``<prefix>/<key id>/<model id>/<name>``. Host memory is registered with Mooncake's client, which
transfers from and to slots without a copy. The master lists no objects, so `scan` finds none.

The library ends transfers without progress (`mooncake.client.STALL_S`). The calling thread returns only when the memory
is free again. The memory of a running transfer belongs to the library.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence

from kvtier.errors import TierError
from kvtier.tier.base import Read, Tier, Write
from kvtier.tier.mooncake.client import (
    ABSENT,
    LANES,
    LOST,
    NO_MASTER,
    NO_TENANT,
    NOT_READY,
    NOT_TAKEN,
    OK,
    QUOTA_USED,
    MooncakeClient,
)
from kvtier.tier.mooncake.replica_reads import MooncakeNodes, Want
from kvtier.tier.operation_guard import OperationGuard
from kvtier.types import Figures, ObjectName

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 10.0
CORES_PER_WRITE = 4
"""The library keeps a core busy until a write ends. Threads that wait for cores slow all writes down."""

NO_PLACE = -200
_REFUSALS = {
    NO_PLACE: "no node has room",
    NOT_TAKEN: "a node does not accept its copy",
    NOT_READY: "other writes take too long",
    QUOTA_USED: "the quota of its tenant (tenant_id) has no room",
    NO_TENANT: "the master does not know its tenant (tenant_id); add it to the master's tenant quotas",
}


class MooncakeTier(Tier):
    """Keeps frames in a Mooncake store that several nodes use.

    Args:
        client: client of the store, which the tier closes.
        prefix: prefix of all keys, with a slash at its end.
        key_id: 16 bytes that identify the secret (`keys.secret.key_id`).
        model: 16 bytes that identify the model (`keys.secret.model_id`).
        name: the tier's name in metrics and errors.
        deadline_s: longest time of a read or delete. A write that has waited half of it for other writes is dropped.
        probe_deadline_s: longest time of a `contains` call.
        memory: host memory that most objects are read into and written from.

    Raises:
        TierError: the master does not answer, or the memory cannot be registered.
    """

    def __init__(
        self,
        client: MooncakeClient,
        *,
        prefix: str,
        key_id: bytes,
        model: bytes,
        name: str = "mooncake",
        deadline_s: float = 10.0,
        probe_deadline_s: float = 0.5,
        memory: Sequence[memoryview] = (),
    ) -> None:
        super().__init__(name)
        self._client = client
        self._root = root_of(prefix, key_id, model)
        self._deadline_s, self._probe_deadline_s = deadline_s, probe_deadline_s
        self._guard = OperationGuard(name)
        self._lock = threading.Lock()
        self._written_bytes = 0
        self._is_away = False
        """Whether the master did not answer the last write."""
        self._nodes = MooncakeNodes(name, client.engine)
        self._memory = list(memory)
        """Registered memory, which must exist until it is unregistered."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._may_write = threading.BoundedSemaphore(max(1, cores // CORES_PER_WRITE))
        atexit.register(self.close)  # a thread that returns from the library while Python is exiting aborts the process
        try:
            with self._guard:
                client.exist([self._root], deadline_s)
                for view in self._memory:
                    client.register(view)
        except BaseException:
            self.close()
            raise

    def figures(self) -> Figures:
        """Return figures that contain only the number of bytes written by this process."""
        return Figures(write_bytes={"frames": self._written_bytes})

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each name whether the store has it on a node that is not known to be silent.

        This makes one request to the master for all names, or two while a node is silent. The master notices a dead
        node only after some seconds.
        """
        with self._guard:
            keys = [self._root + name.hex() for name in names]
            found = self._client.exist(keys or [self._root], self._probe_deadline_s)[: len(keys)]
            if not any(found) or not self._nodes.has_silent:
                return found
            there = [key for key, is_there in zip(keys, found, strict=True) if is_there]
            copies = self._client.copies(there, self._probe_deadline_s)
            return [any(not self._nodes.is_silent(each.endpoint) for each in copies.get(key, ())) for key in keys]

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Read frames, each from its offset into its buffer.

        All frames are read at the same time, each from the first copy that can be read.

        An object that is only on silent nodes counts as absent. The read fails if a node answers but does not send the
        object.
        """
        with self._guard:
            end_s = time.monotonic() + self._deadline_s
            keys = [self._root + each.name.hex() for each in reads]
            views = [each.into.cast("B") for each in reads]
            if not keys:
                return []
            found = self._client.copies(keys, self._deadline_s)
            wants: list[Want | None] = []
            with self._client.registered(views) as places:
                for key, view, place, (_, _, offset) in zip(keys, views, places, reads, strict=True):
                    copies = found.get(key)
                    size = max(0, min(view.nbytes, copies[0].size_bytes - offset)) if copies else 0
                    wants.append(Want(copies, place, size, offset, is_done=size == 0) if copies else None)
                self._nodes.read([want for want in wants if want and not want.is_done], end_s - time.monotonic())
            return [self._found(want) for want in wants]

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """Write frames of different names, each atomically.

        All frames are written at the same time. The result is False if there is no room, or a node does not accept its
        copy.
        """
        with self._guard:
            views = {self._root + each.name.hex(): each.frame.cast("B") for each in writes}
            full = {key: view for key, view in views.items() if view.nbytes}  # the library loses empty objects
            codes = dict(zip(full, self._put(list(full), list(full.values())), strict=True)) if full else {}
            answers = {key: self._answer(codes.get(key, ABSENT)) for key in views}
            with self._lock:
                self._written_bytes += sum(view.nbytes for key, view in views.items() if answers[key] is True)
            return [answers[self._root + each.name.hex()] for each in writes]

    def delete(self, name: ObjectName) -> None:
        """Delete `name`, if it exists, even while a reader has it in use."""
        with self._guard:
            key = self._root + name.hex()
            code: int = self._client.ask(lambda store: store.remove(key, True), self._deadline_s)
            if code not in {OK, ABSENT, NOT_READY}:  # an object that is being written is not stored yet
                raise TierError(self.name, f"cannot delete an object (code {code})")

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Return nothing, because the master lists no objects."""
        with self._guard:
            return iter(())

    def close(self) -> None:
        """Wait for running operations and end the client. Idempotent. A hanging call keeps the client and memory."""
        if not self._guard.close():
            return
        atexit.unregister(self.close)
        is_idle = self._guard.wait_empty(CLOSE_DEADLINE_S)
        if not is_idle or not self._client.close():
            logger.warning("tier %s: closed while an operation ran for over %s s", self.name, CLOSE_DEADLINE_S)
            return
        self._memory.clear()

    def _found(self, want: Want | None) -> int | TierError | None:
        if want is None or want.is_done:
            return want and want.size_bytes
        return TierError(self.name, f"cannot read an object: {want.failure}") if want.failure else None

    def _put(self, keys: Sequence[str], views: Sequence[memoryview]) -> list[int]:
        """Put `LANES` objects at a time. Stop if a node or the master refuses some, as the next would wait as long."""
        end_s, codes = time.monotonic() + self._deadline_s, list[int]()
        if self._may_write.acquire(timeout=self._deadline_s / 2):
            try:
                while len(codes) < len(keys) and min(codes, default=OK) > NOT_TAKEN and time.monotonic() < end_s:
                    piece = slice(len(codes), len(codes) + LANES)
                    codes += self._client.put(keys[piece], views[piece])
            finally:
                self._may_write.release()
        if codes:
            self._is_away = any(code in LOST for code in codes)
        # A write that was not tried must not count as an answer of the master, as a refusal would.
        return codes + [NO_MASTER if self._is_away else NOT_READY] * (len(keys) - len(codes))

    def _answer(self, code: int) -> bool | TierError:
        if code in LOST:
            return TierError(self.name, f"cannot write: the master does not answer (code {code})")
        if code != OK:
            self.refusals.refused(
                _REFUSALS.get(code, f"Mooncake answered with code {code}"),
                LANES if code in {NOT_TAKEN, NOT_READY} else 1,
            )
        return code == OK


def root_of(prefix: str, key_id: bytes, model: bytes) -> str:
    """Return the prefix of all keys of one secret and model."""
    return f"{prefix}{key_id.hex()}/{model.hex()}/"
