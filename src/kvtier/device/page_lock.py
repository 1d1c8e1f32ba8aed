"""Page-locks host memory for copies to and from a CUDA device. Imports torch.

Locking some GB takes about a second, because the kernel must fault in each page. So a thread does it after the start;
until then copies run at the speed of pageable memory. It locks parts of whole slots: the driver rejects a copy that
crosses the edge of a locked range, and blocks its other calls while it locks.

An engine captures CUDA graphs at its start, at the same time. By default the driver then refuses to lock in any thread
(error 900), and the capture fails with it. So the thread first declares that captures do not concern it.
"""

import ctypes
import logging
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from kvtier.errors import ConfigError

logger = logging.getLogger(__name__)

PART_BYTES = 256 << 20
"""Approximate bytes that one call locks; the driver blocks other calls for about 50 ms meanwhile."""
STOP_DEADLINE_S = 30.0

_MEANINGS = {
    1: "invalid value",
    2: "out of memory",
    304: "the system refused",
    801: "not supported here",
    900: "a CUDA graph was captured",
}

_NOT_SUPPORTED = 801
_RELAXED = 2
"""The capture mode of a thread whose calls no capture forbids."""


class CudaRegistrar:
    """The two calls of the CUDA runtime. Each returns 0 or an error code."""

    _PORTABLE = 1

    def register(self, address: int, size_bytes: int) -> int:
        """Page-lock `size_bytes` from `address` on, for all devices."""
        runtime = self._runtime()  # the driver is initialized before its mode is set
        return _relaxed() or int(runtime.cudaHostRegister(address, size_bytes, self._PORTABLE))

    def unregister(self, address: int) -> int:
        """Unlock the range that was registered at `address`."""
        return int(self._runtime().cudaHostUnregister(address))

    @staticmethod
    def _runtime() -> Any:  # noqa: ANN401 - torch gives the runtime as a module of its own making
        import torch  # noqa: PLC0415 - the rest of the module is tested without torch

        return cast("Any", torch.cuda.cudart())


def _relaxed() -> int:
    """Allow this thread to call the driver during a capture of another thread; a CUDA error code."""
    import torch  # noqa: PLC0415

    own = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"  # finds the CUDA runtime that torch uses
    for library, name in ((own, "cudaThreadExchange"), ("libcuda.so.1", "cuThreadExchange")):
        try:
            exchange = getattr(ctypes.CDLL(str(library)), f"{name}StreamCaptureMode")
        except (OSError, AttributeError):
            continue
        return int(exchange(ctypes.byref(ctypes.c_int(_RELAXED))))
    return _NOT_SUPPORTED


class Lock:
    """The page lock of one mapping.

    Args:
        registrar: makes the driver calls.
        address: of the mapping.
        size_bytes: its length.
        unit_bytes: a slot; no copy crosses a multiple of it. 0 locks the mapping in one call.
    """

    def __init__(self, registrar: CudaRegistrar, address: int, size_bytes: int, unit_bytes: int) -> None:
        self._registrar = registrar
        self._parts = _parts(address, size_bytes, unit_bytes)
        self._locked: list[int] = []
        self._stop = threading.Event()
        self.size_bytes = size_bytes
        self.locked_bytes = 0
        self.error = 0
        """CUDA error code that ended it."""
        self.ended = threading.Event()
        # In its own thread even if the start waits: CUDA keeps an error in the calling thread, where torch would raise.
        threading.Thread(target=self._run, name="kvtier page lock", daemon=True).start()

    def unlock(self) -> None:
        """Stop locking, and unlock all locked parts."""
        self._stop.set()
        if not self.ended.wait(STOP_DEADLINE_S):
            logger.warning(
                "%d MiB of host memory stay page-locked: the CUDA driver did not return within %g s",
                self.locked_bytes >> 20,
                STOP_DEADLINE_S,
            )
            return
        for address in self._locked:
            code = self._registrar.unregister(address)
            if code:
                logger.warning("host memory at %#x stays page-locked: CUDA error %d", address, code)
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
                logger.warning("%s Copies of the remaining memory are slower, but correct.", explained(self))
            self.ended.set()


def cuda_page_lock(mode: str, registrar: CudaRegistrar | None = None) -> Callable[..., Callable[[], None]] | None:
    """The page-locking function for an `Arena`; None if `mode` is ``off``.

    Args:
        mode: the setting `host.page_lock`. ``auto`` locks after the start and accepts failure; with ``on`` the start
            waits for it.
        registrar: makes the driver calls; default: the CUDA runtime.

    The returned function raises `ConfigError` if the mode is ``on`` and the memory cannot be locked.
    """
    if mode == "off":
        return None
    locks = registrar or CudaRegistrar()

    def lock(address: int, size_bytes: int, unit_bytes: int = 0) -> Callable[[], None]:
        made = Lock(locks, address, size_bytes, unit_bytes)
        if mode == "on":
            # Without a deadline: "on" asks to wait for as long as the kernel faults in pages.
            made.ended.wait(timeout=None)
            if made.error:
                made.unlock()
                raise ConfigError(
                    f"host.page_lock = on: {explained(made)} Allowed: a smaller host.capacity_bytes, or auto"
                )
        return made.unlock

    return lock


def explained(lock: Lock) -> str:
    """How much is locked, the driver's error, and the limits of this host."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limits = [f"locked memory {'unlimited' if limit == resource.RLIM_INFINITY else f'{limit >> 10} KiB'} (ulimit -l)"]
    for place in ("memory.max", "memory/memory.limit_in_bytes"):
        bound = _read(Path("/sys/fs/cgroup") / place)
        if bound.isdigit():
            limits.append(f"memory {int(bound) >> 20} MiB ({place} of the control group)")
    available = next(
        (line.split()[1] for line in _read(Path("/proc/meminfo")).splitlines() if line.startswith("MemAvailable")), ""
    )
    if available.isdigit():
        limits.append(f"available now {int(available) >> 10} MiB")
    meaning = _MEANINGS.get(lock.error, "see the CUDA documentation")
    return (
        f"{lock.locked_bytes >> 20} of {lock.size_bytes >> 20} MiB of host memory are page-locked; CUDA error "
        f"{lock.error} ({meaning}) stopped it. Limits of this host: {', '.join(limits)}. In a container, raise them "
        "with --ulimit memlock=-1 and the memory limit."
    )


def _parts(address: int, size_bytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    step = max(PART_BYTES // unit_bytes, 1) * unit_bytes if unit_bytes else max(size_bytes, 1)
    return [(address + start, min(step, size_bytes - start)) for start in range(0, size_bytes, step)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
