"""Page-locks host memory for copies to and from a CUDA device. This module imports torch.

Locking a few GB takes about a second, because the kernel must fault in each page. So a thread does it after the start.
Until then, copies run at the speed of pageable memory. The thread locks ranges of whole slots, because the driver
rejects a copy that crosses the edge of a locked range. While it locks a range, the driver blocks its other calls.
Only this thread makes these calls, because CUDA remembers an error for the thread that made the call, and torch would
raise it there.

Meanwhile a starting engine captures CUDA graphs. By default the driver then refuses to lock in any thread
(error 900), and the capture also fails. So the thread first declares that captures do not affect its calls.
"""

import ctypes
import logging
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from kvtier.device.control_groups import memory_limit, text_of
from kvtier.errors import ConfigError

logger = logging.getLogger(__name__)

PART_BYTES = 256 << 20
"""Approximate number of bytes that one call locks. During the call, the driver blocks other calls for about 50 ms."""
STOP_DEADLINE_S = 2.0
"""Time that `unlock` waits for a locking call to return. Afterwards the memory stays mapped until the process ends."""
UNLOCK_DEADLINE_S = 10.0
"""Time that `unlock` waits for each unlocking call."""
WORD_S = 10.0
"""Time after which a start that waits in mode ``on`` logs why it waits."""

_MEANINGS = {
    1: "invalid value",
    2: "out of memory",
    304: "the system refused",
    712: "already registered",
    801: "not supported here",
    900: "a CUDA graph was captured",
}

_NOT_SUPPORTED = 801
_RELAXED = 2
"""The capture mode in which captures do not restrict a thread's calls."""

_told: set[str] = set()
"""Failures that this process has already logged, for any mapping."""
_telling = threading.Lock()


class CudaRegistrar:
    """Makes the two calls of the CUDA runtime that lock and unlock memory. Each returns 0 or an error code.

    Args:
        device: the CUDA device that the calling thread uses from then on; None leaves it unchanged. A new thread starts
            on device 0, where the first call would take a few hundred MiB for a context.
    """

    _PORTABLE = 1

    def __init__(self, device: int | None = None) -> None:
        self._device = device

    def register(self, address: int, size_bytes: int) -> int:
        """Page-lock `size_bytes` bytes at `address`, for all devices."""
        runtime = self._runtime()  # initializes the driver before the capture mode is set
        return _relaxed() or int(runtime.cudaHostRegister(address, size_bytes, self._PORTABLE))

    def unregister(self, address: int) -> int:
        """Unlock the range that was registered at `address`."""
        return int(self._runtime().cudaHostUnregister(address))

    def _runtime(self) -> Any:  # noqa: ANN401 - torch gives the runtime as a module of its own making
        import torch  # noqa: PLC0415 - the rest of the module is tested without torch

        if self._device is not None:
            torch.cuda.set_device(self._device)
        return cast("Any", torch.cuda.cudart())


def _current_device() -> int:
    import torch  # noqa: PLC0415

    return torch.cuda.current_device()


def _relaxed() -> int:
    """Allow this thread to call the driver while another captures a CUDA graph. Return 0 or a CUDA error code."""
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
        address: start of the mapping.
        size_bytes: length of the mapping.
        unit_bytes: size of a slot; no copy crosses a slot boundary. 0 locks the mapping in one call.
        is_required: whether the caller raises an error after a failure. Otherwise the failure is logged.
    """

    def __init__(
        self, registrar: CudaRegistrar, address: int, size_bytes: int, unit_bytes: int, *, is_required: bool = False
    ) -> None:
        self._registrar, self._is_required = registrar, is_required
        self._parts = _parts(address, size_bytes, unit_bytes)
        self._locked: list[int] = []
        self._stop = threading.Event()
        self._unlocked = threading.Event()
        self.size_bytes = size_bytes
        self.locked_bytes = 0
        self.error = 0
        """The CUDA error code that stopped the locking; -1 after an exception, and 0 without an error."""
        self.failure = ""
        """A description of the error; empty if there is none."""
        self.ended = threading.Event()
        """Set when nothing more will be locked."""
        self._refusal = ""
        """The reason why some memory cannot be unlocked; empty if there is none."""
        threading.Thread(target=self._run, name="kvtier page lock", daemon=True).start()

    def unlock(self) -> None:
        """Stop locking, and unlock all locked parts.

        Raises:
            RuntimeError: some memory is still locked, or being locked, and must stay mapped.
        """
        self._stop.set()
        if not self.ended.wait(STOP_DEADLINE_S):
            raise RuntimeError(f"the CUDA driver did not return within {STOP_DEADLINE_S:g} s")
        left = len(self._locked)
        while not self._unlocked.wait(UNLOCK_DEADLINE_S):
            if len(self._locked) == left:
                raise RuntimeError(f"the CUDA driver has unlocked nothing for {UNLOCK_DEADLINE_S:g} s")
            left = len(self._locked)
        if self._locked:
            raise RuntimeError(self._refusal)

    def _run(self) -> None:
        self._lock_all()
        if self.failure and not self._is_required and not self._stop.is_set():
            with _telling:
                is_new = self.failure not in _told
                _told.add(self.failure)
            if is_new:
                logger.warning("%s Copies of the remaining memory are slower, but correct.", explained(self))
        self.ended.set()
        self._stop.wait(timeout=None)  # until `unlock`
        self._unlock_all()

    def _lock_all(self) -> None:
        try:
            for address, size_bytes in self._parts:
                if self._stop.is_set():
                    return
                self.error = self._registrar.register(address, size_bytes)
                if self.error:
                    meaning = _MEANINGS.get(self.error, "see the CUDA documentation")
                    self.failure = f"CUDA error {self.error} ({meaning})"
                    return
                self._locked.append(address)
                self.locked_bytes += size_bytes
        except Exception as error:  # noqa: BLE001 - torch raises one if no device is usable
            self.error, self.failure = -1, repr(error)

    def _unlock_all(self) -> None:
        try:
            for address in tuple(self._locked):
                code = self._registrar.unregister(address)
                if code:
                    self._refusal = f"CUDA error {code} at {address:#x}"
                else:
                    self._locked.remove(address)
        except Exception as error:  # noqa: BLE001
            self._refusal = repr(error)
        self._unlocked.set()


def cuda_page_lock(mode: str, registrar: CudaRegistrar | None = None) -> Callable[..., Callable[[], None]] | None:
    """Return the page-locking function for an `Arena`; None if `mode` is ``off``.

    Args:
        mode: the setting `host.page_lock`. ``auto`` locks after the start and accepts failure. With ``on`` the start
            waits for the lock.
        registrar: makes the driver calls. The default is the CUDA runtime, on the device that the calling thread uses.

    The returned function raises `ConfigError` if the mode is ``on`` and the memory cannot be locked.
    """
    if mode == "off":
        return None
    locks = registrar or CudaRegistrar(_current_device())

    def lock(address: int, size_bytes: int, unit_bytes: int = 0) -> Callable[[], None]:
        made = Lock(locks, address, size_bytes, unit_bytes, is_required=mode == "on")
        if mode == "on":
            if not made.ended.wait(WORD_S):
                logger.warning(
                    "host.page_lock = on: the start waits; %d of %d MiB of host memory are page-locked after %g s. "
                    "With auto the start does not wait",
                    *(made.locked_bytes >> 20, size_bytes >> 20, WORD_S),
                )
            # There is no deadline, because "on" means to wait until the kernel has faulted in all pages.
            made.ended.wait(timeout=None)
            if made.failure:
                with suppress(RuntimeError):  # the error raised below says more
                    made.unlock()
                raise ConfigError(
                    f"host.page_lock = on: {explained(made)} Use a smaller host.capacity_bytes, or set auto"
                )
        return made.unlock

    return lock


def explained(lock: Lock) -> str:
    """Describe how much memory is locked, why locking stopped, and the limits of this host."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limits = [f"locked memory {'unlimited' if limit == resource.RLIM_INFINITY else f'{limit >> 10} KiB'} (ulimit -l)"]
    if (bound := memory_limit()) is not None:
        limits.append(f"memory {bound[0] >> 20} MiB ({bound[1]}, of a control group)")
    available = next(
        (line.split()[1] for line in text_of(Path("/proc/meminfo")).splitlines() if line.startswith("MemAvailable")),
        "",
    )
    if available.isdigit():
        limits.append(f"available now {int(available) >> 10} MiB")
    return (
        f"{lock.locked_bytes >> 20} of {lock.size_bytes >> 20} MiB of host memory are page-locked; {lock.failure} "
        f"stopped the locking. Limits of this host: {', '.join(limits)}. In a container, raise them "
        "with --ulimit memlock=-1 and the memory limit."
    )


def _parts(address: int, size_bytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    step = max(PART_BYTES // unit_bytes, 1) * unit_bytes if unit_bytes else max(size_bytes, 1)
    return [(address + start, min(step, size_bytes - start)) for start in range(0, size_bytes, step)]
