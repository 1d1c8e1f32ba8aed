"""Frames in a Valkey or Redis server, or in a cluster of them, that several nodes use.

An object has the key ``PREFIX/KEY ID/FINGERPRINT/{NAME}``; the braces put all of its parts into one slot of a cluster.
See `valkey_parts` for its values, `valkey_requests` for redirections and repetitions, `valkey_servers` for servers that
fail.
"""

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvtier.errors import TierError
from kvtier.tier.base import Read, Tier, Write
from kvtier.tier.operation_guard import OperationGuard
from kvtier.tier.valkey.parts import FRAME_BYTES_MAX, Loading, Storing, frame_bytes, look, removals
from kvtier.tier.valkey.requests import MOVING, Failure, Request, Requests
from kvtier.tier.valkey.servers import ServerDownError, Servers, info, parse_addresses, slot_of
from kvtier.tier.valkey.wire import LIST_BYTES_MAX, Access, BrokenWireError, Node, RefusedError, Reply, command
from kvtier.types import Figures, ObjectName

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

CLOSE_DEADLINE_S = 5.0
FIGURES_INTERVAL_S = 10.0
"""The servers' memory is asked for at most once in this time."""
SCAN_COUNT = b"500"
HEALTH_KEYS = 8
"""Keys that a health check asks for; they are on different servers of a cluster."""
REGISTRY = "kvtier"
"""Key, below the prefix, of a set of ``KEY ID/FINGERPRINT`` that use the store."""


class ValkeyTier(Tier):
    """Frames as values, which the servers evict by their policy, or at the end of their lifetime.

    Args:
        addresses: ``HOST[:PORT]``, several with commas; of a cluster some of its servers.
        key_id: 16 bytes that identify the secret, see `keys.secret.key_id`.
        fingerprint: of the model, at least 16 bytes.
        name: the tier's name in metrics and errors.
        prefix: of all keys.
        access: user, password, TLS.
        lifetime_s: how long an object lives after its last use; 0: for ever.
        deadline_s: longest time of an operation, all attempts together.
        probe_deadline_s: longest time of a `contains`.
        is_user: the store is used, not only looked at; a look renews no lifetime.

    Raises:
        ConfigError: a setting is wrong: an address, the password, a server of another kind.
        TierError: no server answers.
    """

    def __init__(
        self,
        addresses: str,
        *,
        key_id: bytes,
        fingerprint: bytes,
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
        self._own = f"{key_id.hex()}/{fingerprint.hex()[:32]}"
        self._root = f"{prefix}/{self._own}/{{".encode()
        self._health_keys = [f"{prefix}/{key_id.hex()}/{{{n}}}".encode() for n in range(HEALTH_KEYS)]
        self._lifetime = str(math.ceil(lifetime_s * 1000)).encode() if lifetime_s and is_user else b""
        self._deadline_s, self._probe_deadline_s = deadline_s, probe_deadline_s
        self._guard = OperationGuard(name)
        self._lock = threading.Lock()
        self._written_bytes = 0
        self._figures_s = -math.inf
        self._memory: tuple[int | None, int | None] = (None, None)
        nodes = parse_addresses(addresses)
        self.servers = Servers(name, nodes, access or Access(), time.monotonic() + deadline_s)
        """Also for tools."""
        self._requests = Requests(self.servers)
        try:
            if is_user:
                self._register()
                self._warn_without_eviction()
        except BaseException:
            self.servers.close()
            raise

    def figures(self) -> Figures:
        """Bytes written by this process; memory used by the servers, for whatever, and its limit if all have one."""
        with self._guard:
            now_s = time.monotonic()
            if now_s - self._figures_s > FIGURES_INTERVAL_S:
                self._figures_s = now_s
                self._memory = self._measured_memory()
            used, capacity = self._memory
            return Figures(used, capacity, write_bytes={"frames": self._written_bytes})

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """For each name, whether its first part exists: one pipeline for each server, all at once.

        Names on a server of a cluster that failed are absent, while another server answers.
        """
        with self._guard:
            asked = [self._key(each) for each in names]
            requests = [Request(slot, [command(b"EXISTS", key)]) for slot, key in asked] or self._health_requests()
            self._requests.run(requests, time.monotonic() + self._probe_deadline_s)
            if all(each.has_failed for each in requests):
                failed = next((each for each in requests if not self._is_at_rest(each)), None)
                if failed is not None:
                    raise self._error(failed, "look")
            return [each.answer == 1 and not each.has_failed for each in requests[: len(names)]]

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """See `Tier`. One round trip. An object that is not whole is absent."""
        with self._guard:
            return self._load([self._loading(*each) for each in reads])

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """See `Tier`. One round trip, or two when an object has several parts.

        False when a server has no memory, or its slot is moving.
        """
        with self._guard:
            return self._store(writes)

    def delete(self, name: ObjectName) -> None:
        """Delete `name` and all of its parts, if it exists."""
        with self._guard:
            slot, key = self._key(name)
            header = look(slot, key)
            end_s = self._end_s()
            self._run([header], "delete", end_s)
            self._run(removals(slot, key, frame_bytes(header.answer) or 0), "delete", end_s)

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Every (name, frame bytes) of this model and secret, in pages, one server after the other."""
        with self._guard:
            return self._scan()

    def discard(self) -> None:
        """Remove everything of this model and secret.

        Raises:
            TierError: a server does not answer.
        """
        for keys in self.pages(f"{self._prefix}/{self._own}/".encode()):
            self._run([Request(_slot_of_key(key), [command(b"UNLINK", key)]) for key in keys], "remove")
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
        """Slot and key of the first part."""
        tag = name.hex().encode()
        return slot_of(tag), b"%b%b}" % (self._root, tag)

    def _loading(self, name: ObjectName, into: memoryview, offset: int) -> Loading:
        return Loading(*self._key(name), into.cast("B"), offset, self._lifetime)

    def _load(self, loadings: Sequence[Loading]) -> list[int | TierError | None]:
        self._requests.run([part for each in loadings for part in each.parts], self._end_s())
        answers: list[int | TierError | None] = []
        torn: list[Request] = []
        for each in loadings:
            failed = next((part for part in each.parts if part.has_failed), None)
            answers.append(each.byte_count() if failed is None else self._lost(failed, "read", None))
            if failed is None and each.is_torn:
                torn += each.removals()
        if torn:
            self._requests.run(
                torn, time.monotonic() + self._probe_deadline_s
            )  # if it fails, the next reader tries again
        return answers

    def _store(self, writes: Sequence[Write]) -> list[bool | TierError]:
        answers: list[bool | TierError] = [False] * len(writes)
        storings = {
            number: Storing(*self._key(each.name), each.frame.cast("B"), self._lifetime)
            for number, each in enumerate(writes)
            if each.frame.nbytes <= FRAME_BYTES_MAX
        }
        # Large objects are sent in vain when another node has written them.
        looks = {number: self._exists(each) for number, each in storings.items() if not each.is_single}
        end_s = self._end_s()
        self._requests.run(list(looks.values()), end_s)
        for number, each in looks.items():
            if each.has_failed:
                answers[number] = self._lost(each, "write", default=False)
            elif each.answer == 1:
                answers[number] = True
            else:
                continue
            del storings[number]
        self._requests.run([each.request for each in storings.values()], end_s)
        repairs = {number: repair for number, each in storings.items() if (repair := each.repair()) is not None}
        self._requests.run(list(repairs.values()), end_s)
        for number, each in storings.items():
            answers[number] = self._stored(each, repairs.get(number))
        return answers

    def _stored(self, storing: Storing, repair: Request | None) -> bool | TierError:
        request = storing.request if repair is None or storing.request.has_failed else repair
        if not request.has_failed:
            if storing.is_new:
                with self._lock:
                    self._written_bytes += storing.frame_bytes
            return True
        refusal = request.refusal
        if refusal is not None and refusal.code == "OOM":
            self.refusals.refused("a server is full (OOM); set its maxmemory-policy to allkeys-lru")
            return False
        return self._lost(request, "write", default=False)

    def _exists(self, storing: Storing) -> Request:
        return Request(storing.slot, [command(b"EXISTS", storing.key)])

    def _end_s(self) -> float:
        """When an operation that begins now must have ended."""
        return time.monotonic() + self._deadline_s

    def _run(self, requests: Sequence[Request], what: str, end_s: float | None = None) -> None:
        """Run `requests`. Raises `TierError` for the first without an answer."""
        self._requests.run(requests, end_s or self._end_s())
        for each in requests:
            if each.has_failed:
                raise self._error(each, what)

    def _error(self, request: Request, what: str) -> TierError:
        cause = request.detail if request.failure is not None else f"refused: {request.refusal}"
        return TierError(self.name, f"cannot {what}: {cause}")

    def _lost(self, request: Request, what: str, default: _Answer) -> _Answer | TierError:
        """Of a request without an answer: `default` when only its server is down or its slot moves, else the error."""
        refusal = request.refusal
        is_moving = refusal is not None and refusal.code in MOVING
        return default if is_moving or self._is_at_rest(request) else self._error(request, what)

    def _is_at_rest(self, request: Request) -> bool:
        """Whether it was not sent, because its server failed a moment ago, and another server answers."""
        return request.failure is Failure.DOWN and self.servers.has_other_than(self.servers.node_of(request.slot))

    def _health_requests(self) -> list[Request]:
        return [
            Request(slot_of(b"%d" % number), [command(b"EXISTS", key)]) for number, key in enumerate(self._health_keys)
        ]

    def _scan(self) -> Iterator[tuple[ObjectName, int]]:
        seen: set[ObjectName] = set()
        for keys in self.pages(self._root):
            names = {name for key in keys if (name := self._name_of(key)) is not None} - seen
            seen |= names
            looks = {name: look(*self._key(name)) for name in names}
            with self._guard:
                self._run(list(looks.values()), "list")
            for name, header in looks.items():
                length = frame_bytes(header.answer)
                if length is not None:
                    yield name, length

    def pages(self, root: bytes) -> Iterator[list[bytes]]:
        """Keys that begin with `root`, some at a time, from all masters; a key may come twice.

        Raises:
            TierError: a server does not answer.
        """
        pattern = b"".join(b"\\" + bytes([each]) if each in b"*?[]\\^" else bytes([each]) for each in root) + b"*"
        self.servers.refresh(self._end_s())  # a server may have come
        for node in self.servers.masters:
            cursor = b"0"
            while True:
                with self._guard:
                    reply = self._ask(node, b"SCAN", cursor, b"MATCH", pattern, b"COUNT", SCAN_COUNT)
                match reply:
                    case [bytes() as cursor, list() as found]:
                        yield [each for each in found if isinstance(each, bytes)]
                    case _:
                        raise TierError(self.name, f"cannot list: {node} answers {str(reply)[:100]}")
                if cursor == b"0":
                    break

    def _name_of(self, key: bytes) -> ObjectName | None:
        tag = key.removeprefix(self._root)
        if len(tag) != 65 or tag[-1:] != b"}":
            return None
        try:
            return ObjectName(bytes.fromhex(tag[:-1].decode()))
        except ValueError:
            return None

    def _ask(self, node: Node, *parts: bytes) -> Reply:
        try:
            return self.servers.ask(node, *parts, end_s=self._end_s())
        except (ServerDownError, BrokenWireError, RefusedError, OSError) as error:
            raise TierError(self.name, f"{node} does not answer: {error}") from None

    def _register(self) -> None:
        """Add the secret and the model to the store's registry. Warn if it has entries of other secrets only."""
        key = f"{self._prefix}/{REGISTRY}".encode()
        slot = slot_of(key)
        add = Request(slot, [command(b"SADD", key, self._own.encode())])
        look = Request(slot, [command(b"SMEMBERS", key)], LIST_BYTES_MAX)
        self._run([look], "open")
        members = look.answer if isinstance(look.answer, list) else []
        known = sorted(
            {each.partition(b"/")[0].decode("ascii", "replace") for each in members if isinstance(each, bytes)}
        )
        if self._own.encode() not in members:
            self._requests.run([add], self._end_s())  # a full server refuses it, and objects can still be read
        if known and self._own.partition("/")[0] not in known:
            logger.warning(
                "tier %s: keys below %r are of another secret only (key id %s); nothing is shared with them. "
                "If this is not intended, configure the same secret on all nodes",
                self.name, self._prefix, known[0][:32],
            )  # fmt: skip

    def _warn_without_eviction(self) -> None:
        for node, facts in self._memory_facts():
            limit, policy = facts.get("maxmemory", ""), facts.get("maxmemory_policy", "")
            if limit == "0" or policy == "noeviction":
                logger.warning(
                    "tier %s: %s has maxmemory %s and policy %s, so that it grows without end or refuses writes; "
                    "set maxmemory, and maxmemory-policy allkeys-lru",
                    self.name, node, limit, policy,
                )  # fmt: skip
                return

    def _memory_facts(self) -> Iterator[tuple[Node, dict[str, str]]]:
        end_s = self._end_s()
        for node in self.servers.masters:
            node_end_s = min(end_s, time.monotonic() + self._probe_deadline_s)
            try:
                reply = self.servers.ask(node, b"INFO", b"memory", end_s=node_end_s)
            except (ServerDownError, BrokenWireError, RefusedError, OSError):
                continue
            if facts := info(reply):
                yield node, dict(facts)

    def _measured_memory(self) -> tuple[int | None, int | None]:
        """Bytes used by all masters, and their limit."""
        found = [
            (int(facts["used_memory"]), int(facts["maxmemory"]))
            for _, facts in self._memory_facts()
            if facts.get("used_memory", "").isdigit() and facts.get("maxmemory", "").isdigit()
        ]
        if len(found) < len(self.servers.masters):
            return None, None
        limits = [limit for _, limit in found]
        if 0 in limits:
            return sum(used for used, _ in found), None
        return sum(min(row) for row in found), sum(limits)


def _slot_of_key(key: bytes) -> int:
    """By the rule of the servers: what is in the first pair of braces counts, if there is one and it is not empty."""
    _, _, rest = key.partition(b"{")
    tag, brace, _ = rest.partition(b"}")
    return slot_of(tag if brace and tag else key)
