"""Measures a GPU's links with kvtier's copies: bandwidth, time to page-lock host memory, and a product's slow-down.

    python bench/links.py --record bench/records/links.json
    python bench/links.py --device cpu --lock 64MiB --order 64 --repeats 2     # the same steps on the CPU

    copies     each way and both at once, as a share of a plain page-locked copy in the same run
    lock       time to page-lock host memory in the background, and the longest wait of another driver call meanwhile
    product    bf16 matrix products alone, next to plain copies and next to kvtier's, both ways at once

The record (--record) is rewritten after each part, and --resume continues it. Imports torch.
"""

import contextlib
import ctypes
import mmap
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
import numpy as np
import torch
from bench.parts.command import (
    continued,
    earlier_record,
    link_chunks_option,
    record_option,
    recorded_settings,
    resume_option,
    taken,
)
from bench.parts.command import run as run_script
from bench.parts.links import CopyBed, CudaDevice, Device, address_of, copies
from bench.parts.models import check_device, device_name

from kvtier.cli.options import tell_written
from kvtier.device.page_lock import CudaRegistrar, Lock
from kvtier.errors import ConfigError
from kvtier.report.output import print_json, write_json
from kvtier.runtime.arena import page_aligned
from kvtier.tools.options import Bytes
from kvtier.tools.run_record import make_record

SLOT_BYTES = 32 << 20
"""Bytes of a chunk of 256 tokens with 128 KiB each. Memory is locked in parts of whole slots."""
SHARE_MAX = 0.03
"""Target: copies should cost at most this share of the product's time."""
_LOCK_S = 300.0
_BEGIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """What to measure."""

    device: str
    lock_bytes: int
    order: int
    """Rows and columns of the matrices."""
    products: int
    repeats: int
    link_chunks: int


class CpuDevice:
    """The CPU in place of a device, with the same steps but another speed."""

    name = "cpu"

    def registrar(self) -> CudaRegistrar:
        """Return a stand-in for the driver."""
        return _Toucher()

    def settle(self) -> None:
        """Do nothing, because all work has ended."""

    def settle_current(self) -> None:
        """Do nothing, because all work has ended."""

    def beside(self, _number: int) -> AbstractContextManager[object]:
        """Return a context that does nothing, because the CPU has no streams."""
        return nullcontext()


class _Toucher(CudaRegistrar):
    """Stands in for the driver, and touches each page."""

    def register(self, address: int, size_bytes: int) -> int:
        pages = np.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), np.uint8)[:: mmap.PAGESIZE]
        pages += np.uint8(0)
        return 0

    def unregister(self, _address: int) -> int:
        return 0


def measure_copies(device: Device, settings: LinkSettings) -> object:
    """Measure the GB/s of each link, and its share of a plain copy."""
    with CopyBed(device, settings.link_chunks) as bed:
        return [{**asdict(it), "ratio": round(it.ratio, 4)} for it in copies(device, bed, settings.repeats)]


def measure_lock(device: Device, settings: LinkSettings) -> object:
    """Measure the seconds to page-lock fresh host memory, while a small tensor is copied to the device repeatedly.

    Raises:
        ConfigError: not all of the memory could be locked in time.
    """
    small = torch.zeros(1024, dtype=torch.uint8)
    waits_s: list[float] = []
    region = page_aligned(settings.lock_bytes)
    began = time.perf_counter()
    lock = Lock(device.registrar(), address_of(region), settings.lock_bytes, SLOT_BYTES)
    while not waits_s or (not lock.ended.is_set() and time.perf_counter() - began < _LOCK_S):
        before = time.perf_counter()
        small.to(device.name)
        device.settle_current()
        waits_s.append(time.perf_counter() - before)
        lock.ended.wait(1e-3)
    seconds, locked = time.perf_counter() - began, lock.locked_bytes
    with suppress(RuntimeError):  # the code below reports a driver that hangs
        lock.unlock()
    if locked < settings.lock_bytes:
        raise ConfigError(
            f"--lock: {locked} of {settings.lock_bytes} bytes are locked after {seconds:.0f} s, "
            f"{lock.failure or 'the time is over'}; allowed: less memory"
        )
    return {
        "bytes": locked,
        "s": seconds,
        "gb_per_s": locked / seconds / 1e9,
        "call_ms": {"median": 1e3 * statistics.median(waits_s), "max": 1e3 * max(waits_s)},
    }


def measure_product(device: Device, settings: LinkSettings) -> object:
    """Measure matrix products alone and next to copies both ways. Ratios are medians over repeats."""
    left, right = (
        torch.randn(settings.order, settings.order, dtype=torch.float32).to(device.name, torch.bfloat16)
        for _ in range(2)
    )
    rows: list[dict[str, float]] = []
    with CopyBed(device, settings.link_chunks) as bed:

        def multiply() -> float:
            device.settle_current()
            began = time.perf_counter()
            for _ in range(settings.products):
                torch.mm(left, right)
            device.settle_current()
            return time.perf_counter() - began

        def plain() -> None:
            with device.beside(1):
                bed.plain_both()
                device.settle_current()
            with device.beside(0):
                device.settle_current()

        arms: dict[str, Callable[[], None] | None] = {
            "alone": None,
            "plain": plain,
            "kvtier": lambda: bed.finish([*bed.scatter(), *bed.gather()]),
        }
        names = list(arms)
        for repeat in range(settings.repeats + 1):
            row: dict[str, float] = {}
            first = repeat % len(arms)
            for name in (*names[first:], *names[:first]):
                with _again(arms[name]) as rate:
                    row[name] = multiply()
                row |= {f"{name}_gb_per_s": 2 * bed.size_bytes * each / 1e9 for each in rate}
            rows.append(row)
    rows = rows[1:]  # the first row warms up
    found: dict[str, float] = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    for name in ("plain", "kvtier"):
        found[f"{name}_slowdown"] = statistics.median(row[name] / row["alone"] - 1 for row in rows)
    return {"order": settings.order, "target": SHARE_MAX, **found, "rows": rows}


@contextlib.contextmanager
def _again(act: Callable[[], None] | None) -> Iterator[list[float]]:
    """Repeat `act` in a thread during the block. Afterwards the list has its calls per second.

    Raises:
        RuntimeError: the thread failed, or completed no call.
    """
    rate: list[float] = []
    if act is None:
        yield rate
        return
    stop, has_begun = threading.Event(), threading.Event()

    def repeat() -> None:
        began, count = time.perf_counter(), 0
        while not stop.is_set():
            act()
            count += 1
            has_begun.set()
        rate.append(count / (time.perf_counter() - began))

    thread = threading.Thread(target=repeat, name="kvtier bench copies", daemon=True)
    thread.start()
    try:
        has_begun.wait(_BEGIN_S)
        yield rate
    finally:
        stop.set()
        thread.join(_BEGIN_S)
    if not rate:
        raise RuntimeError("the copies next to the product failed; see above")


PARTS: dict[str, Callable[[Device, LinkSettings], object]] = {
    "copies": measure_copies,
    "lock": measure_lock,
    "product": measure_product,
}


@click.command()
@click.option("--device", default="cuda", show_default=True, help="cuda, cuda:1, cpu.")
@click.option("--lock", "lock_bytes", type=Bytes(), default="64GiB", show_default=True, help="Host memory to lock.")
@click.option("--order", type=click.IntRange(1, 65536), default=8192, show_default=True, help="Of the matrices.")
@click.option("--products", type=click.IntRange(1), default=400, show_default=True, help="In a sample.")
@click.option("--repeats", type=click.IntRange(1, 100), default=7, show_default=True, help="Samples per median.")
@link_chunks_option
@record_option
@resume_option
def links(record: Path | None, resume: bool, **given: Any) -> None:  # noqa: ANN401, FBT001 - flags
    """Copies to and from a device, page-locking, and a product next to copies."""
    settings, recorded = taken(LinkSettings, given), recorded_settings(given)
    check_device(settings.device)
    name = device_name(settings.device)
    earlier = earlier_record(record, "links", settings=recorded, seed=None, device=name) if resume else None
    results: dict[str, Any] = {"device": name, "measured": []}
    if earlier is not None:
        results = {part: earlier["results"][part] for part in ("device", "measured", *earlier["results"]["measured"])}
    if earlier is not None and earlier["results"]["is_complete"]:
        click.echo(f"{record}: complete, nothing is left to measure")
        return
    device: Device = CudaDevice(settings.device) if settings.device.startswith("cuda") else CpuDevice()
    for part in [it for it in PARTS if it not in results["measured"]]:
        results[part] = PARTS[part](device, settings)
        results["measured"].append(part)
        print_json({part: results[part]})
        if record is not None:
            done = {"is_complete": set(PARTS) <= set(results["measured"]), "continues": continued(earlier)}
            made = make_record("links", settings=recorded, seed=None, results=results | done)
            write_json("--record", record, made)
    tell_written(record)


if __name__ == "__main__":
    run_script(links)
