"""Keeps frames in a Valkey or Redis server, or in a cluster of them, that several nodes use.

An object has the key ``PREFIX/KEY ID/MODEL ID/{NAME}``. The braces put all of its parts into one slot of a cluster.
`valkey.parts` defines its values, `valkey.pipeline` repeats requests, and `valkey.servers` handles servers that fail.
"""

import logging
import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from kvtier.errors import TierError
from kvtier.tier.base import Read, Tier, Write
from kvtier.tier.operation_guard import OperationGuard
from kvtier.tier.valkey.connection import Access, BrokenWireError, RefusedError, cause_of, command
from kvtier.tier.valkey.parts import (
    FRAME_BYTES_MAX,
    PART_BYTES,
    Front,
    Loading,
    frame_bytes,
    header_request,
    removal,
    write_request,
)
from kvtier.tier.valkey.pipeline import MOVING, Request, Requests, Transaction
from kvtier.tier.valkey.servers import ServerDownError, Servers, parse_addresses, slot_of
from kvtier.types import Figures, ObjectName

logger = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 5.0
SCAN_COUNT = b"500"
HEALTH_KEYS = 8
"""Number of keys that a health check asks for, on different servers of a cluster."""
_TAG = re.compile(rb"[0-9a-f]{64}\}")
REGISTRY = "kvtier"
"""Key below the prefix. Its value is the set of every ``KEY ID/MODEL ID`` that uses the store."""


class ValkeyTier(Tier):
    """Keeps frames as values, which the servers evict by their policy or at the end of their lifetime.

    Args:
        addresses: ``HOST[:PORT]``, several with commas; for a cluster, some of its servers.
        key_id: 16 bytes that identify the secret (`keys.secret.key_id`).
        model: 16 bytes that identify the model (`keys.secret.model_id`).
        name: the tier's name in metrics and errors.
        prefix: prefix of all keys.
        access: user, password and TLS.
        lifetime_s: how long an object lives after its last use; 0 means without limit.
        deadline_s: longest time of an operation with all its attempts.
        probe_deadline_s: longest time of a `contains` call.
        is_user: whether the store is used and not only inspected. Inspection renews no lifetime.

    Raises:
        ConfigError: an address is wrong.
        UnusablePathError: a server refuses the password, or is not a Valkey server.
        TierError: no server answers.
    """

    def __init__(
        self,
        addresses: str,
        *,
        key_id: bytes,
        model: bytes,
        name: str = "valkey",
        prefix: str = "kvtier",
        access: Access | None = None,
        lifetime_s: float = 0.0,
        deadline_s: float = 10.0,
        probe_deadline_s: float = 0.5,
        is_user: bool = True,
    ) -> None:
        super().__init__(name)
        self._prefix = prefix
        self._own = f"{key_id.hex()}/{model.hex()}"
        self._root = f"{prefix}/{self._own}/{{".encode()
        self._health_keys = [
            (slot_of(b"%d" % n), f"{prefix}/{key_id.hex()}/{{{n}}}".encode()) for n in range(HEALTH_KEYS)
        ]
        self._lifetime = str(math.ceil(lifetime_s * 1000)).encode() if lifetime_s and is_user else b""
        self._deadline_s, self._probe_deadline_s = deadline_s, probe_deadline_s
        self._guard = OperationGuard(name)
        self._lock = threading.Lock()
        self._written_bytes = 0
        nodes = parse_addresses(addresses)
        self.servers = Servers(name, nodes, access or Access(), time.monotonic() + deadline_s)
        """The servers, public for tools."""
        self._requests = Requests(self.servers)
        try:
            if is_user:
                self._register()
                self._warn_without_eviction()
        except BaseException:
            self.servers.close()
            raise

    def figures(self) -> Figures:
        """Return figures that contain only the number of bytes written by this process."""
        return Figures(write_bytes={"frames": self._written_bytes})

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each name whether its first part exists. All servers are asked at once, each in one pipeline.

        Names on a failed server of a cluster count as absent while another server answers.
        """
        with self._guard:
            asked = [self._key(each) for each in names]
            requests = [_exists(*each) for each in asked or self._health_keys]
            self._requests.run(requests, time.monotonic() + self._probe_deadline_s)
            problems = [problem for each in requests if (problem := self._problem(each, "look for objects"))]
            if problems and all(each.has_failed for each in requests):
                raise problems[0]
            return [each.answer == 1 and not each.has_failed for each in requests[: len(names)]]

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Read frames, each from its offset into its buffer.

        This takes one round trip, or two if an object is torn. An object that is then still torn counts as absent.
        """
        with self._guard:
            loadings = [
                Loading(*self._key(each.name), each.into.cast("B"), each.offset, self._lifetime) for each in reads
            ]
            end_s = self._end_s()
            self._requests.run([part for each in loadings for part in each.parts], end_s)
            answers = [self._answer(each) for each in loadings]
            # A writer may have replaced the object between the reads of its parts, so read it once more.
            torn = {at: each.again() for at, each in enumerate(loadings) if each.is_torn}
            if torn:
                self._requests.run([part for each in torn.values() for part in each.parts], end_s)
                answers = [self._answer(torn[at]) if at in torn else it for at, it in enumerate(answers)]
                left = [each.removal() for at, each in torn.items() if each.is_torn and each.is_like(loadings[at])]
                if left:  # if it fails, the next reader tries again
                    self._requests.run(left, time.monotonic() + self._probe_deadline_s)
            return answers

    def peek_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Read the starts of frames, without counting as a use.

        This reads only the wanted bytes of the first part, in one round trip, and renews no lifetime. If a read has an
        offset or goes beyond the first part, the whole batch is read with `read_many` instead.
        """
        if any(each.offset or not 0 < each.into.nbytes <= PART_BYTES for each in reads):
            return self.read_many(reads)
        with self._guard:
            fronts = [Front(*self._key(each.name), each.into.cast("B")) for each in reads]
            self._requests.run(fronts, self._end_s())
            return [self._problem(each, "read") if each.has_failed else each.byte_count() for each in fronts]

    def _answer(self, loading: Loading) -> int | TierError | None:
        failed = next((part for part in loading.parts if part.has_failed), None)
        return loading.byte_count() if failed is None else self._problem(failed, "read")

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """Write frames of different names, each atomically.

        This takes one round trip, or two if an object has several parts.

        The result is False if a server has no memory, the slot is moving, or the frame exceeds `FRAME_BYTES_MAX`.
        """
        with self._guard:
            answers: list[bool | TierError] = [False] * len(writes)
            requests = {
                number: write_request(*self._key(each.name), each.frame.cast("B"), self._lifetime)
                for number, each in enumerate(writes)
                if each.frame.nbytes <= FRAME_BYTES_MAX
            }
            # Large objects would be sent in vain if another node has written them.
            large = [number for number, each in requests.items() if isinstance(each, Transaction)]
            present = {number: _exists(*self._key(writes[number].name)) for number in large}
            end_s = self._end_s()
            self._requests.run(list(present.values()), end_s)
            for number, each in present.items():
                if each.answer == 1:
                    answers[number] = True
                    del requests[number]
            self._requests.run(list(requests.values()), end_s)
            for number, each in requests.items():
                answers[number] = self._stored(each, writes[number].frame.nbytes)
            return answers

    def delete(self, name: ObjectName) -> None:
        """Delete `name` and all of its parts, if it exists. If its header is unreadable, delete only the first part.

        The other parts are not an object without the first, and the next write of the name replaces them.
        """
        with self._guard:
            slot, key = self._key(name)
            header = header_request(slot, key)
            end_s = self._end_s()
            self._requests.run([header], end_s)
            if header.refusal is not None:
                raise self._error(header, "delete")
            self._run([removal(slot, key, frame_bytes(header.answer) or 0)], "delete", end_s)

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Yield the names and frame sizes of this model and secret, in pages, one server after the other."""
        with self._guard:
            return self._scan()

    def discard(self) -> None:
        """Remove everything stored for this model and secret, and their entry in the registry.

        Raises:
            TierError: a server does not answer.
        """
        for keys in self.pages(self._root):
            tags = [key.removeprefix(self._root).partition(b"}")[0] for key in keys]
            unlinks = [command(b"UNLINK", key) for key in keys]
            self._run([Request(slot_of(tag), [each]) for tag, each in zip(tags, unlinks, strict=True)], "remove")
        registry = f"{self._prefix}/{REGISTRY}".encode()
        with self._guard:
            self._run([Request(slot_of(registry), [command(b"SREM", registry, self._own.encode())])], "remove")

    def close(self) -> None:
        """Wait for running operations and close the connections. Idempotent."""
        if not self._guard.close():
            return
        if not self._guard.wait_empty(CLOSE_DEADLINE_S):
            logger.warning("tier %s: closed while an operation ran for over %s s", self.name, CLOSE_DEADLINE_S)
        self.servers.close()

    def _key(self, name: ObjectName) -> tuple[int, bytes]:
        """Return the slot and key of the first part."""
        tag = name.hex().encode()
        return slot_of(tag), b"%b%b}" % (self._root, tag)

    def _stored(self, request: Request, byte_count: int) -> bool | TierError:
        refusal = request.refusal
        if refusal is not None and refusal.code == "OOM":
            self.refusals.refused("a server is full (OOM); set its maxmemory-policy to allkeys-lru")
            return False
        if request.has_failed:
            return self._problem(request, "write") or False
        if request.answer is not None:
            with self._lock:
                self._written_bytes += byte_count
        return True

    def _end_s(self) -> float:
        """Return when an operation that starts now must have ended."""
        return time.monotonic() + self._deadline_s

    def _run(self, requests: Sequence[Request], what: str, end_s: float | None = None) -> None:
        """Run `requests`. Raises `TierError` for the first that failed."""
        self._requests.run(requests, end_s or self._end_s())
        for each in requests:
            if each.has_failed:
                raise self._error(each, what)

    def _error(self, request: Request, what: str) -> TierError:
        return TierError(self.name, f"cannot {what}: {request.failure or f'refused: {request.answer}'}")

    def _problem(self, request: Request, what: str) -> TierError | None:
        """Return why `request` failed, or None if it did not fail or its object is a miss for now.

        An object is a miss while its slot moves, and while its server is down but another one answers.
        """
        refusal = request.refusal
        is_moving = refusal is not None and refusal.code in MOVING
        is_at_rest = bool(request.failure) and request.is_down and self.servers.has_live
        return None if is_moving or is_at_rest or not request.has_failed else self._error(request, what)

    def _scan(self) -> Iterator[tuple[ObjectName, int]]:
        seen: set[ObjectName] = set()
        for keys in self.pages(self._root):
            names: set[ObjectName] = set()
            for key in keys:
                tag = key.removeprefix(self._root)
                if _TAG.fullmatch(tag):
                    names.add(ObjectName(bytes.fromhex(tag[:-1].decode())))
            names -= seen
            seen |= names
            headers = {name: header_request(*self._key(name)) for name in names}
            with self._guard:
                self._run(list(headers.values()), "list")
            for name, header in headers.items():
                length = frame_bytes(header.answer)
                if length is not None:
                    yield name, length

    def pages(self, root: bytes) -> Iterator[list[bytes]]:
        """Yield the keys that begin with `root`, in batches, from all masters. A key may appear twice.

        Raises:
            TierError: a server does not answer.
        """
        self.servers.refresh(self._end_s())  # a server may have joined
        for node in self.servers.masters:
            cursor = b"0"
            while True:
                scan = (b"SCAN", cursor, b"MATCH", root + b"*", b"COUNT", SCAN_COUNT)
                try:
                    with self._guard:
                        reply = self.servers.ask(node, *scan, end_s=self._end_s())
                except (ServerDownError, BrokenWireError, RefusedError, OSError) as error:
                    raise TierError(self.name, f"{node} does not answer: {cause_of(error)}") from None
                match reply:
                    case [bytes() as cursor, list() as found]:
                        yield [each for each in found if isinstance(each, bytes)]
                    case _:
                        raise TierError(self.name, f"cannot list the objects: {node} answers {str(reply)[:100]}")
                if cursor == b"0":
                    break

    def _register(self) -> None:
        """Add the secret and the model to the store's registry. Warn if it has only entries of other secrets."""
        key = f"{self._prefix}/{REGISTRY}".encode()
        slot = slot_of(key)
        add = Request(slot, [command(b"SADD", key, self._own.encode())])
        look = Request(slot, [command(b"SMEMBERS", key)])
        self._run([look], "open")
        members = look.answer if isinstance(look.answer, list) else []
        known = sorted(
            {each.partition(b"/")[0].decode("ascii", "replace") for each in members if isinstance(each, bytes)}
        )
        if self._own.encode() not in members:
            self._requests.run([add], self._end_s())  # a full server refuses this, but objects can still be read
        if known and self._own.partition("/")[0] not in known:
            logger.warning(
                "tier %s: keys below %r belong to another secret only (key id %s); nothing is shared with them. "
                "If this is not intended, configure the same secret on all nodes",
                self.name, self._prefix, known[0][:32],
            )  # fmt: skip

    def _warn_without_eviction(self) -> None:
        for node in self.servers.masters:
            facts: dict[str, str] = {}
            with suppress(ServerDownError, BrokenWireError, RefusedError, OSError):
                end_s = time.monotonic() + self._probe_deadline_s
                reply = self.servers.ask(node, b"INFO", b"memory", end_s=end_s)
                text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""
                facts = dict(re.findall(r"(\w+):(\S+)", text))
            limit, policy = facts.get("maxmemory", ""), facts.get("maxmemory_policy", "")
            if limit == "0" or policy == "noeviction":
                logger.warning(
                    "tier %s: %s has maxmemory %s and policy %s, so it grows without end or refuses writes; "
                    "set maxmemory, and maxmemory-policy allkeys-lru",
                    self.name, node, limit, policy,
                )  # fmt: skip
                return


def _exists(slot: int, key: bytes) -> Request:
    return Request(slot, [command(b"EXISTS", key)])
