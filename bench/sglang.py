"""Measures kvtier's `disk` tier, HiCache's file backend, Mooncake and fio in turn, through SGLang's real controller.

    make .venv-sglang/.done
    .venv-sglang/bin/python bench/sglang.py --dir DIR --record bench/records/sglang.json

A page has 64 tokens of Llama 3.1 8B in 16-bit numbers: 8 MiB, half keys and half values. Pages move between HiCache's
host memory and the backend on HiCache's own threads, so no GPU is needed. kvtier's tier is full and replaces victims,
and verifies what it reads. The others write new objects without a cap, and do not verify. HiCache's files are written
to the page cache, and are also timed until the drive has them. Reads come from the drive. Mooncake keeps the pages in
the memory of another process, over TCP on loopback. `batch_exists` asks for 2,048 pages.
"""

import contextlib
import importlib
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

if __name__ == "__main__":  # not this folder: bench/sglang.py would hide SGLang
    sys.path[:1] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests/sglang")]

import click
from bench.parts.command import record_option, recorded_settings
from bench.parts.command import run as run_script

from kvtier.cli.options import tell_written
from kvtier.connect.sglang.installed_engine import check_version, installed
from kvtier.errors import ConfigError
from kvtier.report.output import print_json, progress, write_json
from kvtier.report.table import Table, print_table
from kvtier.tier.files.direct import can_direct
from kvtier.tools.bench.io import Fio, has_fio
from kvtier.tools.bench.repeats import Span, ratio, ratio_text
from kvtier.tools.options import WorkDirectory, ended_by_signals
from kvtier.tools.run_record import make_record

Untyped: TypeAlias = Any
"""Objects of SGLang, and of `tests/sglang/engines.py`, which wraps them."""

PAGE_TOKENS = 64
LLAMA_8B = {"layers": 32, "heads": 8, "dim": 128}
SMALL = {"layers": 1, "heads": 1, "dim": 8}
"""Shape of the pages that `batch_exists` asks for. Their size does not matter, and 2,048 full pages take 16 GiB."""

ASKED_PAGES = 2048
ASKS = 20
FIO_BYTES = 4 << 20
CAPACITY = 2.5
"""Capacity of kvtier's tier and of Mooncake's memory, as a multiple of one sample."""

WAIT_S = 120.0
START_S = 60.0

_NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 64 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"setup: {code}", flush=True)
sys.stdin.read()
"""
"""A process that lends its memory to Mooncake until its stdin ends."""


@dataclass(frozen=True, slots=True)
class SglangRow:
    """The figures of one system and operation. A GB is 10^9 bytes of payload."""

    system: str
    """``fio``, ``kvtier disk``, ``hicache file`` or ``mooncake``."""
    op: str
    """``backup`` and ``prefetch`` end with the controller's answer, ``backup to the drive`` when the data is there."""
    gb_per_s: float
    """Median."""
    ratio: float
    """Ratio to fio."""
    ratio_span: Span
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AskRow:
    """The figures of `batch_exists` for `pages` stored pages."""

    system: str
    pages: int
    ms: float
    """Median of one call for all of them."""
    query_ms: float
    """Median of the controller's query for that prompt, hashing included, in calls of 128."""
    samples_ms: tuple[float, ...]


class Arm(Protocol):
    """A storage system."""

    system: str
    backend: str
    """SGLang's name of the backend."""

    def settings(self, name: str, total_bytes: int) -> dict[str, Any]:
        """Return the backend's configuration for a store of `total_bytes`."""
        ...

    def flush(self) -> bool:
        """Bring what was acknowledged to the drive. Return whether there was anything to do."""
        ...

    def forget(self, storage: Untyped) -> None:
        """Remove all objects from SGLang's backend, unless the store replaces them itself."""
        ...


@dataclass
class KvtierDisk:
    """kvtier's `disk` tier."""

    root: Path
    threads: int
    system: str = "kvtier disk"
    backend: str = "dynamic"

    def settings(self, name: str, total_bytes: int) -> dict[str, Any]:
        """Return the configuration of a `disk` tier with that capacity."""
        tier = {
            "kind": "disk",
            "path": str(self.root / f"kvtier-{name}"),
            "capacity_bytes": max(int(CAPACITY * total_bytes), 256 << 20),
            "read_threads": self.threads,
            "write_threads": self.threads,
        }
        return {"tiers": [tier]}

    def flush(self) -> bool:
        """Do nothing, because with direct I/O the drive has everything."""
        return False

    def forget(self, storage: Untyped) -> None:
        """Do nothing, because the tier replaces objects itself."""


@dataclass
class HiCacheFiles:
    """SGLang's own backend of files."""

    root: Path
    system: str = "hicache file"
    backend: str = "file"
    _places: list[Path] = field(default_factory=list[Path])

    def settings(self, name: str, total_bytes: int) -> dict[str, Any]:
        """Return the configuration, which has no size."""
        del total_bytes
        place = self.root / f"hicache-{name}"
        self._places.append(place)
        return {"file_storage_path": str(place)}

    def flush(self) -> bool:
        """Sync, and empty the page cache, so that reads come from the drive."""
        for path in self._files():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
        return True

    def forget(self, storage: Untyped) -> None:
        """Remove all objects."""
        storage.clear()

    def _files(self) -> Iterator[Path]:
        return (path for place in self._places for path in place.iterdir() if path.is_file())


@dataclass
class Mooncake:
    """Mooncake Store: the memory of another process, over TCP."""

    port: int
    system: str = "mooncake"
    backend: str = "mooncake"

    def settings(self, name: str, total_bytes: int) -> dict[str, Any]:
        """Return the configuration, which depends on neither argument."""
        del name, total_bytes
        return {
            "master_server_address": f"127.0.0.1:{self.port}",
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 0,
        }

    def flush(self) -> bool:
        """Do nothing, because the objects stay in memory."""
        return False

    def forget(self, storage: Untyped) -> None:
        """Remove all objects, even those with a lease, which Mooncake would not replace."""
        storage.store.remove_all(force=True)


@contextlib.contextmanager
def mooncake(folder: Path, memory_bytes: int) -> Generator[Mooncake]:
    """Start a master, and a process with the memory.

    Raises:
        ConfigError: Mooncake is missing, or does not start.
    """
    program = Path(sys.executable).with_name("mooncake_master")
    if not program.exists():
        raise ConfigError(f"{program} is missing; allowed: the environment of make .venv-sglang/.done")
    port, metrics = _free_ports(2)
    flags = [
        f"--rpc_port={port}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", f"--metrics_port={metrics}",
    ]  # fmt: skip
    with (folder / "mooncake.log").open("wb") as log:
        master = subprocess.Popen([str(program), *flags], stdout=log, stderr=log)
        command = [sys.executable, "-c", _NODE, f"127.0.0.1:{port}", str(memory_bytes)]
        node: subprocess.Popen[str] | None = None
        try:
            _wait_for(port)
            node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
            assert node.stdout is not None
            lines = iter(node.stdout.readline, "")  # Mooncake prints there too
            answer = next((line.strip() for line in lines if line.startswith(("ready", "setup:"))), "it ended")
            if answer != "ready":
                raise ConfigError(f"Mooncake does not start: {answer}")
            yield Mooncake(port)
        finally:
            for process in (node, master):
                if process is not None:
                    process.kill()
                    process.wait(START_S)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_for(port: int) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.05)
    raise ConfigError(f"Mooncake's master does not listen within {START_S:g} s")


# ---- measurements ----------------------------------------------------------------------------------------------------


def hicache() -> Untyped:
    """Return the module `tests/sglang/engines.py`. It imports SGLang, which takes seconds."""
    importlib.import_module("torchvision_shim").install()
    return importlib.import_module("engines")


def new_prompt(pages: int) -> list[int]:
    """Return the tokens of a prompt that no store has."""
    return [secrets.randbelow(1 << 31) for _ in range(pages)] * PAGE_TOKENS


def backup(engine: Untyped, tokens: Sequence[int], keys: list[str], indices: Untyped) -> float:
    """Return the seconds until the controller has stored a prompt.

    Raises:
        ConfigError: a page was not stored.
    """
    start_s = time.perf_counter()
    engine.controller.write_storage(indices, list(tokens), hash_value=keys)
    done = engine.controller.ack_backup_queue.get(timeout=WAIT_S)
    spent_s = time.perf_counter() - start_s
    if done.completed_tokens != len(tokens):
        raise ConfigError(f"{engine.backend}: {done.completed_tokens} of {len(tokens)} tokens were stored")
    return spent_s


def query(engine: Untyped, tokens: Sequence[int]) -> tuple[Untyped, float]:
    """Return the controller's operation for a stored prompt, and the seconds of its query.

    Raises:
        ConfigError: a page was not found.
    """
    start_s = time.perf_counter()
    engine.controller.prefetch(secrets.token_hex(8), list(tokens), None)
    hit = engine.controller.prefetch_hit_queue.get(timeout=WAIT_S)
    spent_s = time.perf_counter() - start_s
    if hit.storage_hit_count != len(tokens):
        raise ConfigError(f"{engine.backend}: {hit.storage_hit_count} of {len(tokens)} tokens were found")
    return hit, spent_s


def prefetch(engine: Untyped, tokens: Sequence[int], indices: Untyped) -> float:
    """Return the seconds until the controller has read a stored prompt.

    Raises:
        ConfigError: a page was not read.
    """
    hit, _ = query(engine, tokens)
    hit.host_indices = indices
    start_s = time.perf_counter()
    engine.controller.prefetch_buffer.put(hit)
    completed = 0
    while True:
        ack = engine.controller.ack_prefetch_queue.get(timeout=WAIT_S)
        completed = max(completed, ack.completed_tokens or 0)
        if ack.completed_req:
            break
    spent_s = time.perf_counter() - start_s
    if completed != len(tokens):
        raise ConfigError(f"{engine.backend}: {completed} of {len(tokens)} tokens were read")
    return spent_s


@dataclass
class Station:
    """Runs one arm on host memory that all arms share."""

    arm: Arm
    engine: Untyped
    indices: Untyped
    chain: Callable[[Sequence[int], int], list[str]]
    total_bytes: int

    def sample(self, pages: int, wanted: Sequence[Untyped] | None) -> dict[str, float]:
        """Return the GB/s of each operation for a new prompt. `wanted` has the pages to compare with."""
        self.arm.forget(self.engine.storage)
        tokens = new_prompt(pages)
        keys = self.chain(tokens, PAGE_TOKENS)
        found = {"backup": backup(self.engine, tokens, keys, self.indices)}
        start_s = time.perf_counter()
        if self.arm.flush():
            found["backup to the drive"] = found["backup"] + time.perf_counter() - start_s
        if wanted is not None:
            self.engine.host.kv_buffer.zero_()
        found["prefetch"] = prefetch(self.engine, tokens, self.indices)
        if wanted is not None and not all(
            a.equal(b) for a, b in zip(self.engine.pages(self.indices), wanted, strict=True)
        ):
            raise ConfigError(f"{self.arm.system}: pages were read with other bytes than were written")
        return {op: self.total_bytes / 1e9 / spent_s for op, spent_s in found.items()}


def speeds(
    arms: Sequence[Arm], root: Path, *, pages: int, threads: int, repeats: int, tick: Callable[[str], None]
) -> list[SglangRow]:
    """Measure backup and prefetch of every arm, and fio.

    Raises:
        ConfigError: fio is missing, or a system fails.
    """
    engines = hicache()

    pools = engines.mha("page_first", tokens=pages * PAGE_TOKENS // 2, page=PAGE_TOKENS, **LLAMA_8B)
    host = pools[1]
    total_bytes = pages * PAGE_TOKENS * host.size_per_token
    rates: dict[tuple[str, str], list[float]] = {}
    ceiling = Fio(
        root, block_bytes=FIO_BYTES, threads=threads, total_bytes=total_bytes, is_direct=can_direct(str(root))
    )
    with contextlib.ExitStack() as stack:
        stack.callback(ceiling.close)
        stations: list[Station] = []
        for arm in arms:
            engine = stack.enter_context(
                engines.engine(arm.settings("pages", total_bytes), backend=arm.backend, pools=pools)
            )
            if not stations:
                engine.fill(1)
            indices = stations[0].indices if stations else host.alloc(pages * PAGE_TOKENS)
            stations.append(Station(arm, engine, indices, engines.chain, total_bytes))
        wanted = stations[0].engine.pages(stations[0].indices)
        ceiling.measure("store")
        for station in stations:  # this first round also compares bytes, and fills stores that have a cap
            tick(f"first {station.arm.system}")
            for _ in range(3):
                station.sample(pages, wanted)
        for number in range(repeats):
            for op, known in (("store", ("backup", "backup to the drive")), ("load", ("prefetch",))):
                rate = ceiling.measure(op).gb_per_s
                for name in known:
                    rates.setdefault(("fio", name), []).append(rate)
            for station in (*stations[number % len(stations) :], *stations[: number % len(stations)]):
                tick(f"{number + 1} {station.arm.system}")
                for op, rate in station.sample(pages, None).items():
                    rates.setdefault((station.arm.system, op), []).append(rate)
    return [
        SglangRow(
            system=system,
            op=op,
            gb_per_s=round(statistics.median(samples), 3),
            ratio=ratio(samples, rates["fio", op]).value,
            ratio_span=ratio(samples, rates["fio", op]).span,
            samples=tuple(round(it, 3) for it in samples),
        )
        for (system, op), samples in rates.items()
        if (system, op) != ("fio", "backup to the drive")
    ]


def questions(arms: Sequence[Arm], tick: Callable[[str], None]) -> list[AskRow]:
    """Measure `batch_exists` of every arm, in turn.

    Raises:
        ConfigError: a page is not found.
    """
    engines = hicache()

    pools = engines.mha("page_first", tokens=ASKED_PAGES * PAGE_TOKENS // 2, page=PAGE_TOKENS, **SMALL)
    host = pools[1]
    rows: list[AskRow] = []
    for arm in arms:
        tick(f"batch_exists {arm.system}")
        total_bytes = ASKED_PAGES * PAGE_TOKENS * host.size_per_token
        with engines.engine(arm.settings("small", total_bytes), backend=arm.backend, pools=pools) as engine:
            indices = host.alloc(ASKED_PAGES * PAGE_TOKENS)
            tokens = new_prompt(ASKED_PAGES)
            keys = engines.chain(tokens, PAGE_TOKENS)
            backup(engine, tokens, keys, indices)
            host.free(indices)
            calls, queries = [], []
            for _ in range(ASKS):
                start_s = time.perf_counter()
                count = engine.storage.batch_exists(keys)
                calls.append((time.perf_counter() - start_s) * 1e3)
                if count != ASKED_PAGES:
                    raise ConfigError(f"{arm.system}: {count} of {ASKED_PAGES} pages were found")
                queries.append(query(engine, tokens)[1] * 1e3)
            arm.forget(engine.storage)
        rows.append(
            AskRow(
                system=arm.system,
                pages=ASKED_PAGES,
                ms=round(statistics.median(calls), 3),
                query_ms=round(statistics.median(queries), 3),
                samples_ms=tuple(round(it, 3) for it in calls),
            )
        )
    return rows


@click.command()
@click.option("--dir", "directory", type=WorkDirectory(), required=True, help="A directory on the drive to measure.")
@click.option("--pages", type=click.IntRange(4, 4096), default=64, show_default=True, help="Pages of a sample.")
@click.option("--threads", type=click.IntRange(1, 64), default=4, show_default=True, help="Of kvtier, and fio's jobs.")
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Samples per row.")
@click.option("--only", type=click.Choice(["kvtier", "file", "mooncake"]), multiple=True, help="Leave out the others.")
@record_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def sglang(
    directory: Path,
    pages: int,
    threads: int,
    repeats: int,
    only: tuple[str, ...],
    record: Path | None,
    as_json: bool,  # noqa: FBT001 - a flag of the command
) -> None:
    """Measure backends of HiCache on SGLang's real controller."""
    check_version(installed())
    if not has_fio():
        raise ConfigError("fio is not installed, and its rate is the reference; allowed: install the package fio")
    engines = hicache()

    wanted = only or ("kvtier", "file", "mooncake")
    page_bytes = 2 * PAGE_TOKENS * LLAMA_8B["layers"] * LLAMA_8B["heads"] * LLAMA_8B["dim"] * 2
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory)))
        advance = stack.enter_context(progress("measuring", len(wanted) * (repeats + 2)))
        stack.enter_context(engines.published(engines.checkpoint(root / "model")))
        arms: list[Arm] = []
        if "kvtier" in wanted:
            arms.append(KvtierDisk(root, threads))
        if "file" in wanted:
            arms.append(HiCacheFiles(root))
        if "mooncake" in wanted:
            arms.append(stack.enter_context(mooncake(root, int((CAPACITY + 1) * pages * page_bytes))))

        def tick(_what: str) -> None:
            advance(1)

        asked = questions(arms, tick)
        rows = speeds(arms, root, pages=pages, threads=threads, repeats=repeats, tick=tick)
    results = {"page_bytes": page_bytes, "pages": pages, "speeds": [asdict(it) for it in rows]}
    results |= {"questions": [asdict(it) for it in asked], "repeats": repeats}
    if as_json:
        print_json(results)
    else:
        lines = [(it.system, it.op, f"{it.gb_per_s:.2f}", ratio_text(it.ratio, it.ratio_span)) for it in rows]
        print_table(Table(("system", "operation", "GB/s", "of fio"), lines))
        answers = [(it.system, str(it.pages), f"{it.ms:.2f}", f"{it.query_ms:.2f}") for it in asked]
        print_table(Table(("system", "pages", "batch_exists, ms", "query, ms"), answers))
    if record is not None:
        settings = recorded_settings({"pages": pages, "threads": threads, "repeats": repeats, "only": only})
        made = make_record("sglang", settings=settings, seed=None, results=results, directory=directory)
        write_json("--record", record, made)
        tell_written(record)


if __name__ == "__main__":
    run_script(sglang)
