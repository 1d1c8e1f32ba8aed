"""Keeps frames as objects in an S3 bucket that several nodes use.

An object's key is ``<prefix>/<key id>/<model id>/<name>``. Opening reads the marker ``<prefix>/<key id>/kvtier`` and
writes it if it is missing.

Frames are read and written in the caller's thread; the client releases the interpreter lock. Lookups have their own
threads. The client does not retry; this module does, with jitter. An attempt takes at most half of the deadline and
starts in the first half. So every operation ends within the deadline. A read that stalls (`bucket.STALL_SHARE`) is
repeated once on its own connection.

Payloads have no signature and no S3 checksum. The reader verifies frames, and either would halve the speed of a write.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from heapq import nlargest
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError

from kvtier.errors import DamagedStoreError, NoRoomError, TierError, UnusablePathError
from kvtier.tier.base import About, OneByOneTier, within
from kvtier.tier.buffer_loans import Loan
from kvtier.tier.operation_guard import OperationGuard
from kvtier.tier.s3.bucket import KEY_ID, MARKER, MARKER_NAME, Bucket, flaw, is_there, pages, read_marker
from kvtier.tier.s3.errors import NO_ANSWER, Refusal, hint, pause_s, refusal_of
from kvtier.tier.s3.sweep import S3Sweeper
from kvtier.types import Figures, ObjectName

if TYPE_CHECKING:
    from obstore import ObjectMeta  # it exists only for type checkers

logger = logging.getLogger(__name__)

PUT_BYTES_MAX = 5 << 30
"""The largest object that S3 accepts in one request."""
PART_BYTES = 1 << 18
"""A body is copied in parts of at least this size. Larger parts exceed the processor's cache, which costs a fifth."""
STALLS_MAX = 2
"""An operation fails after this many attempts without an answer."""
LOOKUPS = 32
"""Maximum number of concurrent lookup requests."""
HEALTH_INTERVAL_S = 10.0
"""A health check sends a request only this long after the last answer, because every request costs money."""
CLOSE_DEADLINE_S = 10.0

_T = TypeVar("_T")


class S3Tier(OneByOneTier):
    """Keeps frames as objects of a bucket. They expire by the bucket's lifecycle rule or are swept to keep a cap.

    Args:
        bucket: the bucket, a prefix in it, and the clients.
        key_id: 16 bytes that identify the secret (`keys.secret.key_id`).
        model: 16 bytes that identify the model (`keys.secret.model_id`).
        name: the tier's name in metrics and errors.
        deadline_s: longest time of an operation with all its attempts.
        probe_deadline_s: longest time of a `contains` call.
        capacity_bytes: cap of all objects of the secret; the oldest are deleted. 0 means no cap and no listing.
        sweep_interval_s: how often the objects are listed for the cap, by all nodes together.

    Raises:
        UnusablePathError: the server refuses the credentials, has no such bucket, or is not an S3 server.
        DamagedStoreError: the marker is damaged or of another version.
        TierError: the server does not answer.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        key_id: bytes,
        model: bytes,
        name: str = "s3",
        deadline_s: float = 10.0,
        probe_deadline_s: float = 0.5,
        capacity_bytes: int = 0,
        sweep_interval_s: float = 3600.0,
    ) -> None:
        super().__init__(name)
        self._bucket, self._store = bucket, bucket.store
        self._own = f"{bucket.prefix}{key_id.hex()}/"
        self._root = f"{self._own}{model.hex()}/"
        self._deadline_s, self._probe_deadline_s = deadline_s, probe_deadline_s
        self._guard = OperationGuard(name)
        self._lock = threading.Lock()
        self._written_bytes = 0
        self._is_open = False
        self._is_conditional = True
        self._answered_s = time.monotonic()
        self._verify_place()
        self._is_open = True
        self._lookups = ThreadPoolExecutor(LOOKUPS, f"kvtier-{name}-look")
        self._sweeper: S3Sweeper | None = None
        if capacity_bytes:
            self._sweeper = S3Sweeper(name, self._store, self._own, capacity_bytes, sweep_interval_s)
            self._sweeper.start()

    def figures(self) -> Figures:
        """Return the bytes written by this process and, with a cap, the fill level at the last sweep by any node."""
        written, sweeper = {"frames": self._written_bytes}, self._sweeper
        if sweeper is None:
            return Figures(write_bytes=written)
        return Figures(sweeper.used_bytes, sweeper.capacity_bytes, sweeper.evictions, written)

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each name whether the bucket has it, with concurrent HEAD requests, within the probe deadline.

        A name without an answer in time is False. This raises `TierError` if no name has an answer.
        """
        with self._guard:
            if names:
                return self._look([self._key(name) for name in names])
            if time.monotonic() - self._answered_s > HEALTH_INTERVAL_S:
                self._is_there(self._own + MARKER_NAME)
            return []

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """Read one object of `read_many`. Its bytes are copied twice: out of the client, and then to the buffer."""
        with self._guard:
            key, view = self._key(name), into.cast("B")
            if view.nbytes == 0:
                return 0 if self._attempt("look for objects", lambda: is_there(self._store, key)) else None
            return self._attempt("read", lambda: self._fetch(key, view, offset))

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        """Write a frame. Return False if it is larger than `PUT_BYTES_MAX`."""
        del about
        # After a failed request, the client's connection may still read from the frame for a moment.
        with self._guard, Loan([frame], self.name) as (view,):
            key = self._key(name)
            if view.nbytes > PUT_BYTES_MAX:
                return False
            if self._attempt("write", lambda: self._put(key, view)):
                with self._lock:
                    self._written_bytes += view.nbytes
            return True

    def delete(self, name: ObjectName) -> None:
        """Delete `name`, if it exists."""
        with self._guard:
            key = self._key(name)
            self._attempt("delete", lambda: obstore.delete(self._store, key))

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Yield the names and frame sizes of this model and secret, in pages of a thousand."""
        with self._guard:
            return ((name, row["size"]) for name, row in self._listed(pages(self._store, self._root, 1000)))

    def newest(self, most: int, until_s: float) -> list[ObjectName]:
        """Return at most `most` names, newest first.

        The order is by last modification, among the objects listed in time.
        """
        listed = within(until_s, self._listed(pages(self._store, self._root, 1000)))
        return [name for name, _ in nlargest(most, listed, key=lambda found: found[1]["last_modified"])]

    def close(self) -> None:
        """Wait for running operations. Idempotent."""
        if not self._guard.close():
            return
        if not self._guard.wait_empty(CLOSE_DEADLINE_S):
            logger.warning("tier %s: closed while an operation ran for over %s s", self.name, CLOSE_DEADLINE_S)
        if self._sweeper is not None:
            self._sweeper.close()
        self._lookups.shutdown(wait=False, cancel_futures=True)

    def _key(self, name: ObjectName) -> str:
        return self._root + name.hex()

    def _look(self, keys: Sequence[str]) -> list[bool]:
        end_s = time.monotonic() + self._probe_deadline_s
        try:
            asked = {key: self._lookups.submit(self._is_there, key) for key in keys}
        except RuntimeError:
            raise TierError(self.name, "Python is exiting") from None
        found: dict[str, bool] = {}
        failure: TierError | None = None
        for key, answer in asked.items():
            try:
                found[key] = answer.result(max(0.0, end_s - time.monotonic()))
            except TierError as error:
                failure = error
            except TimeoutError:
                answer.cancel()
                cause = f"{self._bucket.place}: no answer within {self._probe_deadline_s} s"
                failure = TierError(self.name, f"cannot look up objects: {cause}")
        if failure is not None and not found:
            self._answered_s = 0.0
            raise failure
        return [found.get(key, False) for key in keys]

    def _is_there(self, key: str) -> bool:
        return self._attempt("look for objects", lambda: is_there(self._bucket.lookups, key), self._probe_deadline_s)

    def _fetch(self, key: str, view: memoryview, offset: int) -> int | None:
        try:
            found = obstore.get(self._bucket.reads, key, options={"range": (offset, offset + view.nbytes)})
        except FileNotFoundError as error:
            if refusal_of(error).code == "NoSuchBucket":
                raise TierError(self.name, f"{self._bucket.place} is gone") from None
            return None
        except Exception as error:
            if refusal_of(error).status == 416:
                return 0
            raise
        start, end = found.range
        wanted = end - start
        if start != offset or wanted > view.nbytes:
            raise TierError(self.name, f"the server sent bytes {start} to {end} instead of those from {offset}")
        target, count = np.frombuffer(view, np.uint8), 0
        for part in found.stream(PART_BYTES):
            after = count + len(part)
            if after > wanted:
                break
            np.copyto(target[count:after], np.frombuffer(part, np.uint8))
            count = after
        if count != wanted:
            raise TierError(self.name, f"object {key[-64:][:12]}: only {count} of {wanted} bytes arrived")
        return count

    def _put(self, key: str, view: memoryview) -> bool:
        """Write an object, and return whether it is new. Look for it first if the server lacks conditional writes."""
        if self._is_conditional:
            try:
                obstore.put(self._store, key, view, use_multipart=False, mode="create")
            except AlreadyExistsError:
                return False
            except Exception as error:
                if refusal_of(error).status != 501:
                    raise
                logger.info(
                    "tier %s: %s has no conditional writes, so kvtier looks for each object before it writes it",
                    self.name,
                    self._bucket.place,
                )
                self._is_conditional = False
            else:
                return True
        if is_there(self._store, key):
            return False
        obstore.put(self._store, key, view, use_multipart=False)
        return True

    def _listed(self, pages: Iterator[Sequence["ObjectMeta"]]) -> Iterator[tuple[ObjectName, "ObjectMeta"]]:
        while True:
            with self._guard:
                page = self._attempt("list", lambda: next(pages, None))
            if page is None:
                return
            for row in page:
                last = row["path"].rpartition("/")[2]
                with suppress(ValueError):
                    if len(last) == 64:
                        yield ObjectName(bytes.fromhex(last)), row

    def _attempt(self, what: str, act: Callable[[], _T], deadline_s: float | None = None) -> _T:
        """Call `act` until it succeeds. Raise if another attempt would be useless or start too late."""
        last_start_s = time.monotonic() + (deadline_s or self._deadline_s) / 2
        made = stalls = 0
        while True:
            made += 1
            try:
                answer = act()
            except TierError:
                raise
            except Exception as error:  # noqa: BLE001 - some of the client's errors have no common class
                refusal = refusal_of(error)
                stalls += refusal.cause == NO_ANSWER
                rest_s = pause_s(refusal, made) if stalls < STALLS_MAX else None
                if rest_s is None or time.monotonic() + rest_s > last_start_s:
                    self._answered_s = 0.0
                    raise self._error(what, refusal) from None
                time.sleep(rest_s)
            else:
                self._answered_s = time.monotonic()
                return answer

    def _error(self, what: str, refusal: Refusal) -> UnusablePathError | TierError:
        cause = f"{self._bucket.place}: {refusal.cause}"
        if not self._is_open and refusal.is_mistake:
            return UnusablePathError(f"tier {self.name!r}: {cause}: {hint(refusal)}")
        if refusal.is_full and self._is_open:
            return NoRoomError(self.name, cause)
        return TierError(self.name, f"cannot {what}: {cause}")

    def _verify_place(self) -> None:
        """Read the marker, or write it if it is missing, so that mistakes show at the start.

        The marker is the oldest object of its secret, so a lifecycle rule removes it first. It may be missing while
        objects remain.
        """
        key = self._own + MARKER_NAME
        found = self._attempt("open", lambda: read_marker(self._store, key))
        if found is None:
            self._warn_of_other_secrets()
            self._attempt("open", lambda: self._put(key, memoryview(MARKER)))
            found = self._attempt("open", lambda: read_marker(self._store, key))
        if found != MARKER:
            raise DamagedStoreError(self.name, f"{self._bucket.place}: object {key!r} {flaw(found or b'')}")
        self._attempt("open", lambda: is_there(self._store, f"{key}-absent"))  # forbidden without ListBucket

    def _warn_of_other_secrets(self) -> None:
        """Warn if only other secrets are in use here. The check makes one request, and requires permission to list."""
        with suppress(Exception):
            parent = self._bucket.prefix
            firsts = {
                row["path"].removeprefix(parent).partition("/")[0] for row in next(pages(self._store, parent, 10))
            }
            ids = sorted(each for each in firsts if KEY_ID.fullmatch(each))
            if ids and self._own.removeprefix(parent).rstrip("/") not in ids:
                logger.warning(
                    "tier %s: %s below %r has objects of another secret only (key id %s); nothing is shared with them. "
                    "If this is not intended, configure the same secret on all nodes",
                    self.name, self._bucket.place, parent, ids[0],
                )  # fmt: skip
