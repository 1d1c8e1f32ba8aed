"""Runs Mooncake's client library in this process, with one connection to a store, and keeps it from harming an engine.

The library writes to stderr, listens on all addresses and waits for half a minute or more. It frees its threads in
destructors that would hang in a forked child. This module prevents all of that.
"""

import ctypes
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvtier.errors import ConfigError, TierError
from kvtier.tier.deadline_calls import DeadlineCalls, connected, remaining_s
from kvtier.tier.mooncake.socket_filter import shut_out

logger = logging.getLogger(__name__)

SILENT = 4
"""Log level above all of the library's messages."""
CLOSE_DEADLINE_S = 5.0
CONNECT_DEADLINE_S = 2.0
STALL_S = 2
"""A transfer without progress for this long fails, because the library closes its own connection."""
LANES = 16
"""Number of connections to each node. A transfer that finds all of them busy waits, even if they make no progress."""
LIMITS = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": STALL_S,
    "MC_TCP_STATUS_TIMEOUT_SEC": STALL_S,
    "MC_TCP_LANES_PER_PEER": LANES,
    "MC_HANDSHAKE_CONNECT_TIMEOUT": 1,
    "MC_RPC_TIMEOUT_MS": 2000,
    "MC_RPC_CONNECT_TIMEOUT_MS": 2000,
}
"""Limits that the library reads from the environment. Limits that are already set there remain."""
NONSENSE = bytes(64)
"""Bytes that are not a request in any version of the master's protocol."""

OK, BAD_SIZE, NOT_READY, ABSENT, NOT_TAKEN, NO_MASTER = 0, -600, -703, -704, -800, -900
QUOTA_USED, NO_TENANT = -1700, -1701
"""Answer codes of the library."""
LOST = range(QUOTA_USED + 1, NO_MASTER + 1)
"""Answer codes of the library that mean that the master did not answer."""

_MIN_LOG_LEVEL = "_ZN3fLI17FLAGS_minloglevelE"
_opening = threading.Lock()
_in_use: list[tuple[object, object]] = []
"""The library's transfer engines and stores whose threads are running. A forked child has none of these threads."""
_idle: dict[tuple[str, ...], list[tuple[Any, list[int]]]] = {}
"""Transfer engines of closed clients, with their ports, by address, protocol and devices. The next client takes one.

An engine is never freed, because its destructor stops all Python threads for most of a second.
"""

_T = TypeVar("_T")


class Copy(NamedTuple):
    """One copy of an object, as the master describes it."""

    endpoint: str
    """Address of the node."""
    address: int
    """Address in the node's memory."""
    size_bytes: int


class MooncakeClient:
    """A client that stores nothing itself.

    Args:
        tier: the tier's name, for errors.
        master: (host, port) of the master.
        local_address: address of this machine; if empty, that of the interface to the master.
        protocol: ``tcp`` or ``rdma``.
        devices: RDMA devices, separated by commas.
        copies: number of copies of each object written.
        soft_pin: whether objects are evicted after those without a soft pin.
        tenant_id: Mooncake's tenant; empty for the default one.

    Raises:
        ConfigError: the library cannot be loaded.
        TierError: the master does not answer.
    """

    def __init__(
        self,
        tier: str,
        master: tuple[str, int],
        *,
        local_address: str = "",
        protocol: str = "tcp",
        devices: str = "",
        copies: int = 1,
        soft_pin: bool = False,
        tenant_id: str = "",
    ) -> None:
        self._tier = tier
        self._master = f"[{master[0]}]:{master[1]}" if ":" in master[0] else f"{master[0]}:{master[1]}"
        here, place = _addresses(tier, master)
        # The library is not imported with the module, because it starts Go's runtime, which disturbs other commands.
        try:
            library: Any = import_module("mooncake.store")
        except ImportError as error:
            raise ConfigError(f"tier {tier!r}: Mooncake's library cannot be loaded: {error}") from None
        self._complete = library.ReplicaStatus.COMPLETE
        self._config = library.ReplicateConfig()
        self._config.replica_num = copies
        if soft_pin:
            self._config.soft_pin_action = library.SoftPinAction.ENABLE
        self._memory: list[tuple[int, int]] = []
        """Address and bytes of memory that is registered until `close`."""
        self._users: Counter[tuple[int, int]] = Counter()
        """Number of running calls that use other registered memory, by its address and bytes."""
        self._lock = threading.Lock()
        with _opening:  # so that each client finds its own sockets
            self._place = (local_address or here, protocol, devices)
            idle = _idle.get(self._place)
            self.engine: Any
            self.engine, self.ports = idle.pop() if idle else self._listen(*self._place, library.__file__)
            self.store: Any = library.MooncakeDistributedStore()
            name = f"{self._place[0]}:{self.engine.get_rpc_port()}"
            code = self.store.setup(
                *(name, "P2PHANDSHAKE", 0, 0, protocol, devices, place, self.engine.get_engine()),
                tenant_id=tenant_id or "default",
            )
            _silence(library.__file__)
        if code:
            self._keep_engine()
            raise TierError(tier, f"{self._master} does not answer as a Mooncake master (code {code})")
        _in_use.append((self.engine, self.store))
        self._calls = DeadlineCalls(tier, f"the master {self._master}")

    def ask(self, act: Callable[[Any], _T], deadline_s: float) -> _T:
        """Return the result of `act` on the library's store. `act` must only ask the master.

        Raises:
            TierError: there is no result in time.
        """
        store = self.store
        return self._calls.call(lambda: act(store), deadline_s)

    def exist(self, keys: Sequence[str], deadline_s: float) -> list[bool]:
        """Return for each of `keys` whether the master knows it, in one request.

        Raises:
            TierError: the master does not answer.
        """
        codes: list[int] = self.ask(lambda store: store.batch_is_exist(list(keys)), deadline_s)
        if len(codes) != len(keys) or any(code < 0 for code in codes):
            raise TierError(self._tier, f"the master {self._master} does not answer (code {min(codes, default=0)})")
        return [code == 1 for code in codes]

    def copies(self, keys: Sequence[str], deadline_s: float) -> dict[str, list[Copy]]:
        """Return the complete copies in memory for each of `keys` that has any.

        This takes one request, or two if no key has any.

        Raises:
            TierError: the master does not answer.
        """
        end_s = time.monotonic() + deadline_s
        found = self.ask(lambda store: store.batch_get_replica_desc(list(keys)), deadline_s)
        if not found and keys:  # the library gives the same answer without a master
            self.exist(keys[:1], end_s - time.monotonic())
        return {key: self._copies_of(replicas) for key, replicas in found.items()}

    def put(self, keys: Sequence[str], views: Sequence[memoryview]) -> list[int]:
        """Store `views`, and return the library's answer for each. The library reads the memory until this returns.

        It returns after `STALL_S` seconds without progress, and after up to 9 s if the master dies meanwhile.

        Raises:
            TierError: the master has not yet answered an earlier request.
        """
        self._calls.check()
        with self.registered(views) as places:
            return self.store.batch_put_from(list(keys), places, [view.nbytes for view in views], self._config)

    @contextmanager
    def registered(self, views: Sequence[memoryview]) -> Generator[list[int]]:
        """Yield the addresses of `views`, whose memory stays registered during the block."""
        places = [address_of(view) for view in views]
        mine = [
            (place, view.nbytes)
            for place, view in zip(places, views, strict=True)
            if view.nbytes and not self._holds(place, view)
        ]
        with ExitStack() as stack:
            for each in mine:
                self._take(*each)
                stack.callback(self._give_back, *each)
            yield places

    def register(self, view: memoryview) -> None:
        """Let the library transfer from and to this memory until `close`.

        Raises:
            TierError: the library refuses.
        """
        each = address_of(view), view.nbytes
        self._register(*each)
        self._memory.append(each)

    def _take(self, address: int, size_bytes: int) -> None:
        with self._lock:
            if not self._users[address, size_bytes]:
                self._register(address, size_bytes)
            self._users[address, size_bytes] += 1

    def _give_back(self, address: int, size_bytes: int) -> None:
        with self._lock:
            self._users[address, size_bytes] -= 1
            if not self._users[address, size_bytes]:
                del self._users[address, size_bytes]
                self.store.unregister_buffer(address)

    def _register(self, address: int, size_bytes: int) -> None:
        if code := self.store.register_buffer(address, size_bytes):
            raise TierError(self._tier, f"{size_bytes} bytes of memory cannot be registered (code {code})")

    def close(self) -> bool:
        """End the connection when nothing uses it anymore. Return whether that happened in time."""
        if not self._calls.close(CLOSE_DEADLINE_S):
            return False  # a call that hangs still uses the store
        for address, _ in self._memory:
            self.store.unregister_buffer(address)
        thread = threading.Thread(target=self.store.close, name=f"kvtier-{self._tier}-close", daemon=True)
        thread.start()
        thread.join(CLOSE_DEADLINE_S)
        if thread.is_alive():
            return False
        _in_use.remove((self.engine, self.store))
        self._keep_engine()
        return True

    def _keep_engine(self) -> None:
        _idle.setdefault(self._place, []).append((self.engine, self.ports))

    def _holds(self, address: int, view: memoryview) -> bool:
        return any(start <= address and address + view.nbytes <= start + size for start, size in self._memory)

    def _copies_of(self, replicas: Sequence[Any]) -> list[Copy]:
        found: list[Copy] = []
        for each in replicas:
            if each.status == self._complete and each.is_memory_replica():
                where = each.get_memory_descriptor().buffer_descriptor
                found.append(Copy(where.transport_endpoint, where.buffer_address, where.size))
        return found

    def _listen(self, here: str, protocol: str, devices: str, path: str) -> tuple[Any, list[int]]:
        """Start an engine and shut its sockets. Return the engine and the ports."""
        for name, value in LIMITS.items():
            os.environ.setdefault(name, str(value))
        engine: Any = import_module("mooncake.engine").TransferEngine()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))  # never freed (`_idle`)
        _silence(path)
        try:
            code = engine.initialize(here, "P2PHANDSHAKE", protocol, devices)
            _silence(path)
            ports = shut_out(engine.get_rpc_port())
        except OSError as error:
            raise TierError(self._tier, f"the client's sockets cannot be shut: {error.strerror}") from None
        if code:
            raise TierError(self._tier, f"Mooncake's {protocol} transport cannot be started (code {code})")
        if len(ports) < 2:
            logger.warning("tier %s: Mooncake's client listens on all addresses of this machine", self._tier)
        return engine, ports


def _keep_in_child() -> None:
    """Keep the library's destructors from running: without its threads, which a child lacks, they hang or crash.

    Functions given to `on_exit` run in reverse order, and before C++ destructors.
    """
    for each in _in_use:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    if _in_use or _idle:
        c = ctypes.CDLL(None)
        c.on_exit(c["_exit"], None)
        c.on_exit(c["fcloseall"], None)
    _idle.clear()


os.register_at_fork(after_in_child=_keep_in_child)


def address_of(view: memoryview) -> int:
    """Return the address of the memory of `view`."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if view.nbytes else 0


def _addresses(tier: str, master: tuple[str, int]) -> tuple[str, str]:
    """Return this machine's numeric address on the route to `master`, and the master's with its port.

    The library gets no host name, because it would look the name up without a deadline. A real master reacts to
    nonsense by hanging up immediately. This is tested first, because the library's `setup` stops all Python threads
    until the master answers.
    """
    place, here, there = f"{master[0]}:{master[1]}", "", ""
    end_s = time.monotonic() + CONNECT_DEADLINE_S
    try:
        with connected(*master, end_s) as link:
            here, there = str(link.getsockname()[0]), str(link.getpeername()[0])
            link.sendall(NONSENSE)
            link.settimeout(remaining_s(end_s))
            is_master = link.recv(1) == b""
    except ConnectionResetError:
        is_master = bool(here)
    except OSError as error:
        why = error.strerror or str(error)
        raise TierError(tier, f"there is no Mooncake master at {place}: {why}") from None
    if not is_master:
        raise TierError(tier, f"there is no Mooncake master at {place}: another program answers there")
    return here, f"[{there}]:{master[1]}" if ":" in there else f"{there}:{master[1]}"


def _silence(path: str) -> None:
    """Silence the library, which writes each miss to stderr as an error. It resets its log level when it starts."""
    try:
        ctypes.c_int.in_dll(ctypes.CDLL(path), _MIN_LOG_LEVEL).value = SILENT
    except (OSError, ValueError) as error:
        logger.debug("Mooncake's log cannot be silenced: %s", error)
