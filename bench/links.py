"""Links of a GPU with kvtier's copies: bandwidth, time to page-lock host memory, and what a product next to them loses.

    python bench/links.py --record bench/records/links.json
    python bench/links.py --device cpu --lock 64MiB --order 64 --repeats 2     # the same steps on the CPU

    copies     each way and both at once, as a share of a plain page-locked copy in the same run
    lock       time to page-lock host memory in the background, and the longest wait of another driver call meanwhile
    product    bf16 matrix products alone, next to plain copies and next to kvtier's, both ways at once

The record (--record) is rewritten after each part; --resume continues it. Imports torch.
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

from kvtier.bench.record import make_record
from kvtier.cli.options import Bytes, tell_written
from kvtier.device.page_lock import CudaRegistrar, Lock
from kvtier.errors import ConfigError
from kvtier.report.output import print_json, write_json
from kvtier.runtime.arena import page_aligned

SLOT_BYTES = 32 << 20
"""A chunk of 256 tokens with 128 KiB each; memory is locked in parts of whole slots."""
SHARE_MAX = 0.03
"""Target: of the product's time."""
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
    """The CPU in place of a device: the same steps, not the same speed."""

    name = "cpu"

    def registrar(self) -> CudaRegistrar:
        """See `Device`."""
        return _Toucher()

    def settle(self) -> None:
        """See `Device`."""

    def settle_current(self) -> None:
        """See `Device`."""

    def beside(self, _number: int) -> AbstractContextManager[object]:
        """See `Device`."""
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
    """GB/s of each link, and its share of a plain copy."""
    with CopyBed(device, settings.link_chunks) as bed:
        return [{**asdict(it), "ratio": round(it.ratio, 4)} for it in copies(device, bed, settings.repeats)]


def measure_lock(device: Device, settings: LinkSettings) -> object:
    """Seconds to page-lock fresh host memory, while a small tensor is copied to the device again and again.

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
    with suppress(RuntimeError):  # a driver that hangs is reported below
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
    """Seconds of matrix products, alone and next to copies both ways; medians of the ratios within each repeat."""
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
    rows = rows[1:]  # the first warms up
    found: dict[str, float] = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    for name in ("plain", "kvtier"):
        found[f"{name}_slowdown"] = statistics.median(row[name] / row["alone"] - 1 for row in rows)
    return {"order": settings.order, "target": SHARE_MAX, **found, "rows": rows}


@contextlib.contextmanager
def _again(act: Callable[[], None] | None) -> Iterator[list[float]]:
    """Repeat `act` in a thread during the block; afterwards the list has how often a second it ran.

    Raises:
        RuntimeError: the thread failed, or ended no call.
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
