"""A GPU's link to the host: copies of page-locked memory, and of memory that is not, to see what locking buys.

Needs torch and a device; `why_not` says what is missing. Imports torch only when there is a device.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kvtier.errors import ConfigError
from kvtier.probe.result import LinkMeasures, Measure
from kvtier.probe.timing import Limits, Tick, measure
from kvtier.runtime.arena import page_aligned

SET_BYTES = 256 << 20


def why_not(*, has_gpu: bool) -> str | None:
    """Why there is nothing to measure; None where there is."""
    if not has_gpu:
        return "gpu: no device"
    if find_spec("torch") is None:
        return "gpu: torch is not installed"
    torch: Any = import_module("torch")
    return None if torch.cuda.is_available() else "gpu: torch cannot use the device"


def gpu_copies(sizes: tuple[int, ...], limits: Limits, tick: Tick) -> tuple[LinkMeasures, bool]:
    """GB/s of copies to the first GPU and back, and whether our memory could be page-locked.

    Each copy is waited for, as a mover does before it hands on a slot.
    """
    torch: Any = import_module("torch")
    region = page_aligned(SET_BYTES)
    region[:] = 1
    device = torch.empty(SET_BYTES, dtype=torch.uint8, device="cuda")
    found = _both_ways(torch, region, device, sizes, limits, tick, " pageable")
    unlock = _lock(region)
    if unlock is None:
        return LinkMeasures("gpu", tuple(found)), False
    try:
        found = _both_ways(torch, region, device, sizes, limits, tick, "") + found
    finally:
        torch.cuda.synchronize()
        unlock()
    return LinkMeasures("gpu", tuple(found)), True


def _lock(region: Any) -> Callable[[], None] | None:  # noqa: ANN401 - torch takes a plain address
    from kvtier.device.page_lock import cuda_page_lock  # noqa: PLC0415 - imports torch

    lock = cuda_page_lock("on")
    assert lock is not None
    try:
        return lock(int(region.__array_interface__["data"][0]), region.nbytes)
    except ConfigError:
        return None


def _both_ways(
    torch: Any,  # noqa: ANN401 - optional
    region: Any,  # noqa: ANN401
    device: Any,  # noqa: ANN401
    sizes: tuple[int, ...],
    limits: Limits,
    tick: Tick,
    suffix: str,
) -> list[Measure]:
    host: Any = torch.from_numpy(region)
    found: list[Measure] = []
    for size in (it for it in sizes if it <= SET_BYTES):
        for op, source, target in (("to_gpu", host, device), ("from_gpu", device, host)):

            def copy(_worker: int, number: int, size: int = size, source: Any = source, target: Any = target) -> int:  # noqa: ANN401
                start = number % (SET_BYTES // size) * size
                target[start : start + size].copy_(source[start : start + size], non_blocking=True)
                torch.cuda.synchronize()
                return size

            tick(op)
            told = measure(copy, op=f"{op}{suffix}", size=size, depth=1, limits=limits)
            found += [told] if told else []
    return found
