"""Frames as objects in an S3 bucket that several nodes use.

An object's key is ``<prefix>/<key id>/<fingerprint>/<name>``. Opening reads the marker ``<prefix>/<key id>/kvtier``.
Only where that is missing it lists a page, and writes the marker.

Whole frames are read and written in the caller's thread; the client releases the interpreter lock. Lookups and batches
of small objects run concurrently on one event loop. What the loop reads has memory of its own, because it may come when
the caller's slot has another owner. The client does not retry; this module does, with jitter. An attempt takes at most
half of the deadline and begins in its first half, so that every operation ends within it.

Payloads are not signed and have no checksum of S3: the reader verifies frames, and both halve the speed of a store.
"""

import asyncio
import logging
import shlex
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store

from kvtier.errors import ConfigError, DamagedStoreError, TierError
from kvtier.tier.base import Read, Tier, Write
from kvtier.tier.loan import Loan, clear_frames
from kvtier.tier.operation_guard import OperationGuard
from kvtier.tier.refusal_log import NO_ROOM
from kvtier.tier.s3.bucket import (
    KEY_ID,
    MARKER,
    MARKER_NAME,
    Credentials,
    check_endpoint,
    connect,
    flaw,
    foreign_key,
    pages,
    parse_url,
    read_marker,
)
from kvtier.tier.s3.errors import Attempts, Refusal, hint, refusal_of
from kvtier.tier.s3.rewrite import S3Rewriter
from kvtier.tier.s3.sweep import S3Sweeper
from kvtier.tier.s3.upkeep import CLOSE_DEADLINE_S, NO_UPKEEP, Upkeep
from kvtier.types import Figures, ObjectName

if TYPE_CHECKING:
    from obstore import ObjectMeta  # exists for type checkers only

logger = logging.getLogger(__name__)

PUT_BYTES_MAX = 5 << 30
"""The largest object that S3 accepts in one request."""
PART_BYTES = 1 << 18
"""A body is copied in parts of at least this size. Larger ones leave the processor's cache, which costs a fifth."""
CONCURRENCY = 32
"""Requests in flight of one lookup or batch."""
HEALTH_INTERVAL_S = 10.0
"""A health check sends a request only this long after the last answer; every request costs money."""
RELEASE_DEADLINE_S = 1.0
"""How long requests that were cancelled may take to end."""

_T = TypeVar("_T")


class S3Tier(Tier):
    """Frames as objects of a bucket, which expire by the bucket's lifecycle rule or are swept to keep a cap.

    Args:
        url: ``bucket/prefix``, also with ``s3://`` before it; the prefix may be empty.
        key_id: 16 bytes that identify the secret, see `keys.secret.key_id`.
        fingerprint: of the model, at least 16 bytes.
        name: the tier's name in metrics and errors.
        endpoint: URL of the server; empty: AWS.
        region: empty: the environment's, or ``us-east-1``.
        credentials: named keys.
        allow_http: permit an endpoint without TLS.
        virtual_host: the endpoint's host name begins with the bucket.
        ca_file: PEM file of further trusted authorities.
        deadline_s: longest time of an operation, all attempts together.
        probe_deadline_s: longest time of a `contains`.
        connect_deadline_s: longest time to connect.
        upkeep: what is done in the background to the objects.

    Raises:
        ConfigError: a setting is wrong: the URL, the credentials, a missing bucket, a server of another kind.
        DamagedStoreError: the marker is damaged, or other programs have objects where it is missing.
        TierError: the server does not answer, or the process is a fork of one that used S3.
    """

    def __init__(
        self,
        url: str,
        *,
        key_id: bytes,
        fingerprint: bytes,
        name: str = "s3",
        endpoint: str = "",
        region: str = "",
        credentials: Credentials | None = None,
        allow_http: bool = False,
        virtual_host: bool = False,
        ca_file: Path | None = None,
        deadline_s: float = 10.0,
        probe_deadline_s: float = 0.5,
        connect_deadline_s: float = 2.0,
        upkeep: Upkeep = NO_UPKEEP,
    ) -> None:
        super().__init__(name)
        bucket, prefix = parse_url(url)
        check_endpoint(endpoint, allow_http=allow_http)
        self.place = f"bucket {bucket!r} at {endpoint or 'AWS'}"
        """Bucket and server, for messages."""
        given = {"endpoint": endpoint, "allow_http": allow_http, "region": region, "virtual_host": virtual_host}
        options = "&".join(f"{key}={quote(str(it))}" for key, it in {**given, "ca_file": ca_file}.items() if it)
        spec = shlex.quote(f"s3:{bucket}/{prefix.rstrip('/')}{'?' if options else ''}{options}")
        self._advice = f"to mend it, with the tier's credentials in the environment: kvtier inspect repair {spec}"
        self._parent = prefix
        self._own = f"{prefix}{key_id.hex()}/"
        self._root = f"{self._own}{fingerprint.hex()[:32]}/"
        self._deadline_s, self._probe_deadline_s = deadline_s, probe_deadline_s
        self._guard = OperationGuard(name)
        self._lock = threading.Lock()
        self._written_bytes = 0
        self._is_open = False
        self._is_conditional = True
        self._answered_s = time.monotonic()
        self._store = connect(
            name,
            bucket,
            endpoint=endpoint,
            region=region,
            credentials=credentials,
            allow_http=allow_http,
            virtual_host=virtual_host,
            ca_file=ca_file,
            deadline_s=deadline_s,
            connect_deadline_s=connect_deadline_s,
        )
        self._verify_place()
        self._is_open = True
        self._loop: asyncio.AbstractEventLoop | None = None
        """Made by the first lookup or batch."""
        self._loop_thread: threading.Thread | None = None
        self._rewriter: S3Rewriter | None = None
        self._sweeper: S3Sweeper | None = None
        if upkeep.lifetime_s:
            self._rewriter = S3Rewriter(name, self._store, self._root, upkeep, self._count)
            self._rewriter.start()
        if upkeep.capacity_bytes:
            self._sweeper = S3Sweeper(name, self._store, self._own, self._root, upkeep)
            self._sweeper.start()

    def figures(self) -> Figures:
        """Bytes written by this process. The fill level, as of the last sweep of any node, only with a cap."""
        written, sweeper = {"frames": self._written_bytes}, self._sweeper
        if sweeper is None:
            return Figures(write_bytes=written)
        return Figures(sweeper.used_bytes, sweeper.capacity_bytes, sweeper.evictions, written)

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """For each name, whether the bucket has it: one HEAD each, concurrently, within the probe deadline."""
        with self._guard:
            if not names:
                self._check_health()
                return []
            return self._look([self._key(name) for name in names])

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """See `Tier`. One object is read in this thread, with two copies: client to bytes, bytes to the buffer."""
        with self._guard:
            if len(reads) == 1:
                return _in_place(lambda: self._read_alone(*reads[0]))
            acts = [partial(self._fetch_async, self._key(each.name), each.into.nbytes, each.offset) for each in reads]
            found = self._gather("read", acts, self._deadline_s)
            return [_filled(content, each.into) for content, each in zip(found, reads, strict=True)]

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """See `Tier`. One object is written in this thread. False when it is larger than `PUT_BYTES_MAX`."""
        # After a failed request the client's connection may still read from a frame for a moment.
        with self._guard, Loan([each.frame for each in writes], self.name) as views:
            keys = [self._key(each.name) for each in writes]
            if len(writes) == 1:
                return _in_place(lambda: self._write_alone(keys[0], views[0]))
            acts = [partial(self._put_async, key, view) for key, view in zip(keys, views, strict=True)]
            return self._gather("write", acts, self._deadline_s)

    def delete(self, name: ObjectName) -> None:
        """Delete `name`, if it exists."""
        with self._guard:
            key = self._key(name)
            self._attempt("delete", lambda: obstore.delete(self._store, key))

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Every (name, frame bytes) of this model and secret, in pages of a thousand."""
        with self._guard:
            return self._scan(pages(self._store, self._root, 1000))

    def close(self) -> None:
        """Wait for running operations and end the event loop. Idempotent."""
        if not self._guard.close():
            return
        if not self._guard.wait_empty(CLOSE_DEADLINE_S):
            logger.warning("tier %s: closed while an operation ran for over %s s", self.name, CLOSE_DEADLINE_S)
        for work in (self._rewriter, self._sweeper):
            if work is not None:
                work.close()
        if self._loop is not None and self._loop_thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join(CLOSE_DEADLINE_S)

    def _key(self, name: ObjectName) -> str:
        return self._root + name.hex()

    def _read_alone(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        key, view = self._key(name), into.cast("B")
        if view.nbytes == 0:
            return 0 if self._attempt("look", lambda: is_there(self._store, key)) else None
        return self._attempt("read", lambda: self._fetch(key, view, offset))

    def _write_alone(self, key: str, view: memoryview) -> bool:
        if view.nbytes > PUT_BYTES_MAX:
            return False
        if self._attempt("write", lambda: self._put(key, view)):
            self._count(view.nbytes)
        return True

    def _fetch(self, key: str, view: memoryview, offset: int) -> int | None:
        try:
            found = obstore.get(self._store, key, options={"range": (offset, offset + view.nbytes)})
        except FileNotFoundError as error:
            return self._absent(error)
        except Exception as error:
            if refusal_of(error).status == 416:
                return 0
            raise
        start, end = found.range
        wanted = end - start
        if start != offset or wanted > view.nbytes:
            raise TierError(self.name, f"the server sent bytes {start} to {end}, not from {offset}")
        target, count = np.frombuffer(view, np.uint8), 0
        for part in found.stream(PART_BYTES):
            after = count + len(part)
            if after > wanted:
                break
            np.copyto(target[count:after], np.frombuffer(part, np.uint8))
            count = after
        if count != wanted:
            raise TierError(self.name, f"object {key[-64:][:12]}: {count} of {wanted} bytes came")
        if self._rewriter is not None:
            self._rewriter.used(key, found.meta)
        return count

    async def _fetch_async(self, key: str, most: int, offset: int) -> bytes | None:
        """At most `most` bytes of the object, in memory of their own: the caller may have given up when they come."""
        if most == 0:
            return b"" if await self._head(key) else None
        try:
            found = await obstore.get_async(self._store, key, options={"range": (offset, offset + most)})
        except FileNotFoundError as error:
            return self._absent(error)
        except Exception as error:
            if refusal_of(error).status == 416:
                return b""
            raise
        content = await anext(found.stream(most + 1), b"")
        start, end = found.range
        if start != offset or len(content) != end - start or len(content) > most:
            raise TierError(self.name, f"object {key[-64:][:12]}: {len(content)} bytes came, not {start} to {end}")
        if self._rewriter is not None:
            self._rewriter.used(key, found.meta)
        return content

    def _put(self, key: str, view: memoryview) -> bool:
        """Whether the object is new."""
        if not self._is_conditional and is_there(self._store, key):
            return False
        try:
            mode = "create" if self._is_conditional else "overwrite"
            obstore.put(self._store, key, view, use_multipart=False, mode=mode)
        except AlreadyExistsError:
            return False
        except Exception as error:
            if not self._lacks_conditions(error):
                raise
            return self._put(key, view)
        return True

    async def _put_async(self, key: str, view: memoryview) -> bool:
        if view.nbytes > PUT_BYTES_MAX:
            return False
        if not self._is_conditional and await self._head(key):
            return True
        try:
            mode = "create" if self._is_conditional else "overwrite"
            await obstore.put_async(self._store, key, view, use_multipart=False, mode=mode)
        except AlreadyExistsError:
            return True
        except Exception as error:
            if not self._lacks_conditions(error):
                raise
            return await self._put_async(key, view)
        self._count(view.nbytes)
        return True

    async def _head(self, key: str) -> bool:
        try:
            await obstore.head_async(self._store, key)
        except FileNotFoundError:
            return False
        return True

    def _lacks_conditions(self, error: Exception) -> bool:
        """Whether the server refused a write for its condition only. Later writes look first."""
        if not self._is_conditional or refusal_of(error).status != 501:
            return False
        logger.info("tier %s: %s has no conditional writes; each write looks first", self.name, self.place)
        self._is_conditional = False
        return True

    def _absent(self, error: FileNotFoundError) -> None:
        """A miss, unless all of the bucket is missing."""
        if refusal_of(error).code == "NoSuchBucket":
            raise TierError(self.name, f"{self.place} is gone") from None

    def _check_health(self) -> None:
        if time.monotonic() - self._answered_s > HEALTH_INTERVAL_S:
            self._look([self._own + MARKER_NAME])

    def _scan(self, pages: Iterator[Sequence["ObjectMeta"]]) -> Iterator[tuple[ObjectName, int]]:
        while True:
            with self._guard:
                page = self._attempt("list", lambda: next(pages, None))
            if page is None:
                return
            for row in page:
                last = row["path"].rpartition("/")[2]
                with suppress(ValueError):
                    if len(last) == 64:
                        yield ObjectName(bytes.fromhex(last)), row["size"]

    def _attempt(self, what: str, act: Callable[[], _T]) -> _T:
        """`act`, as often as the deadline permits."""
        attempts = Attempts(self._deadline_s)
        while True:
            try:
                answer = act()
            except TierError:
                self._answered_s = 0.0
                raise
            except Exception as error:  # noqa: BLE001 - of the client, of which some have no common class
                refusal = refusal_of(error)
                pause_s = attempts.pause_s(refusal)
                if pause_s is None and not self._is_open and refusal.is_mistake:
                    raise ConfigError(f"tier {self.name!r}: {self.place}: {refusal.cause}: {hint(refusal)}") from None
                if pause_s is None:
                    self._answered_s = 0.0
                    raise self._error(what, refusal) from None
                time.sleep(pause_s)
            else:
                self._answered_s = time.monotonic()
                return answer

    def _look(self, keys: Sequence[str]) -> list[bool]:
        """Whether each of `keys` exists; False without an answer in time. Raises when none has an answer."""
        found = self._gather("look", [partial(self._head, key) for key in keys], self._probe_deadline_s)
        errors = [each for each in found if isinstance(each, TierError)]
        if len(errors) == len(found):
            raise errors[0]
        return [each is True for each in found]

    def _gather(
        self, what: str, acts: Sequence[Callable[[], Awaitable[_T]]], deadline_s: float
    ) -> list[_T | TierError]:
        """Results of `acts`, or their errors, after at most `deadline_s`."""
        if not acts:
            return []
        results = asyncio.run_coroutine_threadsafe(self._run_all(what, acts, deadline_s), self._running_loop())
        try:
            answers = results.result(deadline_s + 2 * RELEASE_DEADLINE_S)
        except TimeoutError:
            results.cancel()
            raise TierError(self.name, f"cannot {what}: the event loop does not answer") from None
        is_answered = not all(isinstance(answer, TierError) for answer in answers)
        self._answered_s = time.monotonic() if is_answered else 0.0
        return answers

    async def _run_all(
        self, what: str, acts: Sequence[Callable[[], Awaitable[_T]]], deadline_s: float
    ) -> list[_T | TierError]:
        limit = asyncio.Semaphore(CONCURRENCY)
        tasks = [asyncio.ensure_future(self._run_one(what, act, deadline_s, limit)) for act in acts]
        try:
            _, late = await asyncio.wait(tasks, timeout=deadline_s)
        finally:  # also when the caller has given up
            for task in tasks:
                task.cancel()  # nothing happens to one that is done
        if late:
            await asyncio.wait(late, timeout=RELEASE_DEADLINE_S)
        overdue = TierError(self.name, f"cannot {what}: {self.place}: no answer within {deadline_s} s")
        return [overdue if task in late else await task for task in tasks]

    async def _run_one(
        self, what: str, act: Callable[[], Awaitable[_T]], deadline_s: float, limit: asyncio.Semaphore
    ) -> _T | TierError:
        attempts = Attempts(deadline_s)
        async with limit:
            while True:
                try:
                    return await act()
                except TierError as error:
                    return error
                except Exception as error:  # noqa: BLE001 - of the client, of which some have no common class
                    refusal = refusal_of(error)
                    pause_s = attempts.pause_s(refusal)
                    if pause_s is None:
                        return self._error(what, refusal)
                    await asyncio.sleep(pause_s)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                name = f"kvtier-{self.name}-loop"
                self._loop_thread = threading.Thread(target=_run_loop, args=(self._loop,), name=name, daemon=True)
                self._loop_thread.start()
            return self._loop

    def _error(self, what: str, refusal: Refusal) -> TierError:
        cause = f"{self.place}: {refusal.cause}"
        if refusal.is_full and self._is_open:
            self.refusals.refused(cause)
            cause = f"{cause}: {NO_ROOM}"
        return TierError(self.name, f"cannot {what}: {cause}")

    def _count(self, written_bytes: int) -> None:
        with self._lock:
            self._written_bytes += written_bytes

    def _verify_place(self) -> None:
        """Read the marker, which is written when it is missing, so that mistakes show at the start.

        It is the oldest object of its secret, so a lifecycle rule removes it first. Then it is missing among objects.
        """
        key = self._own + MARKER_NAME
        found = self._attempt("open", lambda: read_marker(self._store, key))
        if found is None:
            foreign = self._attempt("open", lambda: foreign_key(self._store, self._own))
            if foreign is not None:
                raise DamagedStoreError(
                    self.name,
                    f"{self.place}: {self._own!r} has no marker, and object {foreign!r} is not kvtier's: another "
                    "program uses this prefix; name another prefix, or remove that program's objects",
                )
            self._warn_of_other_secrets()
            self._attempt("open", lambda: self._put(key, memoryview(MARKER)))
            found = self._attempt("open", lambda: read_marker(self._store, key))
        if found != MARKER:
            raise DamagedStoreError(self.name, f"{self.place}: object {key!r} {flaw(found or b'')}; {self._advice}")
        self._attempt("open", lambda: is_there(self._store, f"{key}-absent"))  # forbidden without ListBucket

    def _warn_of_other_secrets(self) -> None:
        """This secret is new here. One request finds out whether others are in use; without permission, none."""
        with suppress(Exception):
            page = next(pages(self._store, self._parent, 10))
            others = {row["path"].removeprefix(self._parent).partition("/")[0] for row in page}
            ids = sorted(each for each in others if KEY_ID.fullmatch(each))
            if ids and self._own.removeprefix(self._parent).rstrip("/") not in ids:
                logger.warning(
                    "tier %s: %s below %r has objects of another secret only (key id %s); nothing is shared with them. "
                    "If this is not intended, configure the same secret on all nodes",
                    self.name, self.place, self._parent, ids[0],
                )  # fmt: skip


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def is_there(store: S3Store, key: str) -> bool:
    """Whether the bucket has an object at `key`."""
    try:
        obstore.head(store, key)
    except FileNotFoundError:
        return False
    return True


def _in_place(act: Callable[[], _T]) -> list[_T | TierError]:
    """The answer to a batch of one object. Nothing of an error refers to the buffer."""
    try:
        return [act()]
    except TierError as error:
        clear_frames(error)
        return [error.with_traceback(None)]


def _filled(content: bytes | TierError | None, into: memoryview) -> int | TierError | None:
    """Copy what was read into the caller's memory, in the caller's thread. Returns the bytes."""
    if not isinstance(content, bytes):
        return content
    into.cast("B")[: len(content)] = content
    return len(content)
