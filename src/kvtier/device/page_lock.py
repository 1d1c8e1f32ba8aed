"""Page-locks host memory for copies to and from a CUDA device. Imports torch.

Locking takes a second for some GB, because the system must find each page. So it goes on behind the start: whatever is
not locked yet is copied all the same, at the speed of pageable memory. It is done in parts, each a whole number of
slots, because the driver refuses copies across the edge of what is locked, and makes others wait while it locks.
"""

import logging
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from kvtier.errors import ConfigError

logger = logging.getLogger(__name__)

PART_BYTES = 256 << 20
"""About so much is locked at a time; the driver keeps other calls waiting for some 50 ms meanwhile."""
STOP_DEADLINE_S = 30.0

_MEANINGS = {1: "invalid value", 2: "out of memory", 304: "the system refused", 801: "not supported here"}


class Registrar(Protocol):
    """The two calls of the driver; each returns 0 or the number of an error."""

    def register(self, address: int, size_bytes: int) -> int:
        """Page-lock so many bytes, for all devices."""
        ...

    def unregister(self, address: int) -> int:
        """Undo it, by the address that was locked."""
        ...


class CudaRegistrar:
    """CUDA's own."""

    _PORTABLE = 1

    def register(self, address: int, size_bytes: int) -> int:
        """See `Registrar`."""
        return int(self._runtime().cudaHostRegister(address, size_bytes, self._PORTABLE))

    def unregister(self, address: int) -> int:
        """See `Registrar`."""
        return int(self._runtime().cudaHostUnregister(address))

    @staticmethod
    def _runtime() -> Any:  # noqa: ANN401 - torch gives the runtime as a module of its own making
        import torch  # noqa: PLC0415 - so that the rest is tested without it

        return cast("Any", torch.cuda.cudart())


class Lock:
    """The page lock of one mapping.

    Args:
        registrar: locks.
        address: of the mapping.
        size_bytes: its length.
        unit_bytes: no copy crosses a multiple of so many bytes; 0: it is locked in one piece.
    """

    def __init__(self, registrar: Registrar, address: int, size_bytes: int, unit_bytes: int) -> None:
        self._registrar = registrar
        self._parts = _parts(address, size_bytes, unit_bytes)
        self._locked: list[int] = []
        self._stop = threading.Event()
        self.size_bytes = size_bytes
        self.locked_bytes = 0
        self.error = 0
        """Number of the error that ended it."""
        self.ended = threading.Event()
        # A thread of its own in any case: a refusal stays in the thread's error state, for torch to stumble over.
        threading.Thread(target=self._run, name="kvtier page lock", daemon=True).start()

    def unlock(self) -> None:
        """Undo what was done, and do no more."""
        self._stop.set()
        if not self.ended.wait(STOP_DEADLINE_S):
            logger.warning("page-locked memory stays locked: the driver has not answered for %g s", STOP_DEADLINE_S)
            return
        for address in self._locked:
            code = self._registrar.unregister(address)
            if code:
                logger.warning("page-locked memory could not be unlocked: CUDA error %d", code)
        self._locked.clear()

    def _run(self) -> None:
        try:
            for address, size_bytes in self._parts:
                if self._stop.is_set():
                    return
                self.error = self._registrar.register(address, size_bytes)
                if self.error:
                    return
                self._locked.append(address)
                self.locked_bytes += size_bytes
        finally:
            if self.error and not self._stop.is_set():
                logger.warning("%s Copies of the rest are slower; they stay correct.", explained(self))
            self.ended.set()


def cuda_page_lock(mode: str, registrar: Registrar | None = None) -> Callable[..., Callable[[], None]] | None:
    """What page-locks memory, as an arena wants it; None where `mode` is ``off``.

    Args:
        mode: the setting `host.page_lock`. With ``auto`` memory is locked behind the start, and used as it is where
            it cannot be locked; with ``on`` the start waits for it.
        registrar: locks; CUDA's own unless a test brings another.

    Raises (from what is returned):
        ConfigError: the mode is ``on`` and the memory cannot be locked.
    """
    if mode == "off":
        return None
    locks = registrar or CudaRegistrar()

    def lock(address: int, size_bytes: int, unit_bytes: int = 0) -> Callable[[], None]:
        made = Lock(locks, address, size_bytes, unit_bytes)
        if mode == "on":
            # As long as the system takes to find the pages: whoever says "on" wants to wait.
            made.ended.wait(timeout=None)
            if made.error:
                made.unlock()
                raise ConfigError(
                    f"host.page_lock = on: {explained(made)} Allowed: a smaller host.capacity_bytes, or auto"
                )
        return made.unlock

    return lock


def explained(lock: Lock) -> str:
    """What was refused, and what limits the host has that may be why."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = [f"locked memory {'unlimited' if limit == resource.RLIM_INFINITY else f'{limit >> 10} KiB'} (ulimit -l)"]
    for name, place in (("memory", "memory.max"), ("memory", "memory/memory.limit_in_bytes")):
        bound = _read(Path("/sys/fs/cgroup") / place)
        if bound.isdigit():
            told.append(f"{name} {int(bound) >> 20} MiB ({place} of the control group)")
    available = next(
        (line.split()[1] for line in _read(Path("/proc/meminfo")).splitlines() if line.startswith("MemAvailable")), ""
    )
    if available.isdigit():
        told.append(f"available now {int(available) >> 10} MiB")
    meaning = _MEANINGS.get(lock.error, "see the driver's list")
    return (
        f"{lock.locked_bytes >> 20} of {lock.size_bytes >> 20} MiB of host memory are page-locked; the driver refused "
        f"more with CUDA error {lock.error} ({meaning}). Limits of this host: {', '.join(told)}; in a container they "
        "are raised with --ulimit memlock=-1 and its memory limit."
    )


def _parts(address: int, size_bytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    step = max(PART_BYTES // unit_bytes, 1) * unit_bytes if unit_bytes else max(size_bytes, 1)
    return [(address + start, min(step, size_bytes - start)) for start in range(0, size_bytes, step)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
