"""Measures cluster stores on loopback: a raw socket, `kvtier bench tier` and LMCache's backend for the store, in turn.

    python3 -m venv peer && peer/bin/pip install lmcache==0.5.6 torch mooncake-transfer-engine-non-cuda==0.3.13.post1
    python bench/cluster.py --lmcache peer/bin/lmcache --record-dir bench/records [--kind valkey]

The servers come from `tests/cluster`, with one node of each. Each repeat measures all paths of a size and number in
flight, in an order that rotates. LMCache has as many workers as kvtier has in flight, and does not verify what it
loads.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from bench.parts.command import recorded_settings
from bench.parts.command import run as run_script
from bench.parts.loopback import Loopback
from bench.peer import bench_l2, durations_ms, rates, run_lmcache
from tests.cluster.mooncake_store import MooncakeStore
from tests.cluster.valkey_bed import Server, install

from kvtier.config.value_types import size_text
from kvtier.errors import ConfigError
from kvtier.report.output import progress, write_json
from kvtier.report.table import Table, print_table
from kvtier.tools.bench.data_paths import SESSION_NAMES, SMALL_BYTES, ClientPath, new_names
from kvtier.tools.bench.repeats import Span, ratio, ratio_text, repeated
from kvtier.tools.options import Bytes, ended_by_signals
from kvtier.tools.run_record import make_record

SOCKET, LMCACHE = "socket", "lmcache"
VALKEY_BYTES = "6gb"
MOONCAKE_BYTES = 4 << 30
MOONCAKE_FLAGS = ("--default_kv_lease_ttl=10m", "--client_ttl=60")
"""Long limits: the library's load fails if its lease ends before, and the master forgets nodes that are delayed."""
DEADLINE_S = 600.0
ROUND_TRIPS = 100
MOONCAKE_DRIVER = Path(__file__).resolve().parent / "parts" / "lmcache_mooncake.py"


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """The figures of one path, operation, size and number in flight. A GB is 10^9 bytes of payload."""

    path: str
    """``socket`` (raw), ``raw``, ``tier`` or ``session`` from `kvtier bench tier`, or ``lmcache``."""
    op: str
    chunk_bytes: int
    in_flight: int
    """For a lookup, the number of names asked for at once."""
    gb_per_s: float | None
    """Median. None for a lookup."""
    ms: float | None
    """Median of a lookup. None for other operations."""
    ratio: float | None
    """Ratio to the socket. None for a lookup."""
    ratio_span: Span | None
    samples: tuple[float, ...]
    """GB/s or ms of each repeat."""


class Store(NamedTuple):
    """A running store."""

    tier: str
    """The tier, as `kvtier bench tier` takes it."""
    lmcache: Callable[[int, int, int], str]
    """Runs LMCache with a size in bytes, a number of objects and how many at once. Returns its benchmark's output."""


@contextmanager
def _valkey(lmcache: Path, root: Path) -> Generator[Store]:
    server = Server(root, install(), "--maxmemory", VALKEY_BYTES, "--maxmemory-policy", "allkeys-lru")

    def peer(size: int, count: int, in_flight: int) -> str:
        adapter = {"type": "resp", "host": "127.0.0.1", "port": server.port, "num_workers": in_flight}
        try:
            return bench_l2(lmcache, adapter, root / "lmcache.json", size, count, "--lookup-max-hit-rate", "1.0")
        finally:
            server.call("FLUSHALL")

    try:
        server.start()
        server.wait()
        yield Store(f"valkey:127.0.0.1:{server.port}", peer)
    finally:
        server.kill()


@contextmanager
def _mooncake(lmcache: Path, root: Path) -> Generator[Store]:
    store = MooncakeStore(root, nodes=1, segment_bytes=MOONCAKE_BYTES, flags=MOONCAKE_FLAGS)
    output = root / "lmcache.json"

    def peer(size: int, count: int, in_flight: int) -> str:
        numbers = {"size": size, "count": count, "batch": count if size == SMALL_BYTES else in_flight}
        options = [f"--{name}={value}" for name, value in numbers.items()]
        driver = [str(lmcache.with_name("python")), str(MOONCAKE_DRIVER), f"--master=127.0.0.1:{store.port}"]
        return run_lmcache([*driver, *options, f"--output={output}"], output)

    try:
        store.start()
        yield Store(f"mooncake:127.0.0.1:{store.port}", peer)
    finally:
        store.close()


STORES: Mapping[str, Callable[[Path, Path], Any]] = {"valkey": _valkey, "mooncake": _mooncake}


def measure(
    store: Store,
    socket: Loopback,
    *,
    sizes: Sequence[int],
    in_flight: Sequence[int],
    repeats: int,
    sample_bytes: int,
    tick: Callable[[], None] = lambda: None,
) -> list[ClusterRow]:
    """Measure every size and number in flight, and lookups.

    Args:
        store: the store.
        socket: the socket that is the ceiling.
        sizes: bytes of an object.
        in_flight: numbers of objects at once.
        repeats: samples per row.
        sample_bytes: least bytes that one sample moves. It has at least two objects for each in flight.
        tick: called after each repeat.

    Raises:
        ConfigError: LMCache or `kvtier bench tier` fails.
    """
    rows: list[ClusterRow] = []
    for size in sizes:
        for at_once in in_flight:
            rows += _speeds(store, socket, size, at_once, repeats, sample_bytes, tick)
    return rows + _lookups(store, socket, repeats, tick)


def _speeds(
    store: Store,
    socket: Loopback,
    size: int,
    in_flight: int,
    repeats: int,
    sample_bytes: int,
    tick: Callable[[], None],
) -> list[ClusterRow]:
    count = max(2 * in_flight, sample_bytes // size)
    path = ClientPath(socket.put, socket.get, socket.delete, "the socket", size, in_flight)
    arms: list[Callable[[], dict[tuple[str, str], float]]] = [
        lambda: _socket(path, size, count),
        lambda: _kvtier(store.tier, size, in_flight, sample_bytes),
        lambda: _lmcache(store, size, count, in_flight),
    ]

    def once(repeat: int) -> dict[tuple[str, str], float]:
        figures: dict[tuple[str, str], float] = {}
        for arm in arms if repeat % 2 else arms[::-1]:
            figures |= arm()
        return figures

    arms[0]()  # the others warm up by themselves
    found = repeated(once, repeats, advance=lambda _steps: tick())
    return [
        ClusterRow(
            path=name,
            op=op,
            chunk_bytes=size,
            in_flight=in_flight,
            gb_per_s=round(statistics.median(samples), 3),
            ms=None,
            ratio=ratio(samples, found[SOCKET, op]).value,
            ratio_span=ratio(samples, found[SOCKET, op]).span,
            samples=_rounded(samples),
        )
        for (name, op), samples in found.items()
    ]


def _socket(path: ClientPath, size: int, count: int) -> dict[tuple[str, str], float]:
    names = new_names(count)
    return {(SOCKET, op): count * size / act(names) / 1e9 for op, act in (("store", path.store), ("load", path.load))}


def _kvtier(tier: str, size: int, in_flight: int, sample_bytes: int) -> dict[tuple[str, str], float]:
    rows = _bench_tier(tier, "--size", size, "--in-flight", in_flight, "--sample", sample_bytes)
    return {(row["path"], row["op"]): row["gb_per_s"] for row in rows if row["op"] != "lookup"}


def _bench_tier(tier: str, *options: object) -> list[dict[str, Any]]:
    """Return the rows of one repeat."""
    command = [sys.executable, "-m", "kvtier.cli.main", "bench", "tier", tier, "--repeats", "1", "--json"]
    done = subprocess.run(
        [*command, *map(str, options)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode:
        raise ConfigError(f"kvtier bench tier failed: {' '.join(done.stderr.split())[-300:]}")
    return json.loads(done.stdout)["results"]


def _lmcache(store: Store, size: int, count: int, in_flight: int) -> dict[tuple[str, str], float]:
    found = rates(store.lmcache(size, count, in_flight), size)
    return {(LMCACHE, op): rate for op, rate in found.items()}


def _lookups(store: Store, socket: Loopback, repeats: int, tick: Callable[[], None]) -> list[ClusterRow]:
    """Measure lookups of stored objects by each path. The socket makes round trips without payload."""
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats):
        started_s = time.perf_counter()
        for name in new_names(ROUND_TRIPS):
            socket.has(name)
        taken_s = (time.perf_counter() - started_s) / ROUND_TRIPS
        found.setdefault((SOCKET, 1), []).append(1e3 * taken_s)
        for row in _bench_tier(store.tier, "--size", SMALL_BYTES, "--in-flight", 1, "--sample", SMALL_BYTES):
            if row["op"] == "lookup":
                found.setdefault((row["path"], row["in_flight"]), []).append(row["ms"])
        output = store.lmcache(SMALL_BYTES, SESSION_NAMES, 4)
        found.setdefault((LMCACHE, SESSION_NAMES), []).append(durations_ms(output, ("lookup",))["lookup"][1])
        tick()
    return [
        ClusterRow(path, "lookup", SMALL_BYTES, names, None, round(statistics.median(ms), 3), None, None, _rounded(ms))
        for (path, names), ms in found.items()
    ]


def _rounded(samples: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(it, 3) for it in samples)


def _table(kind: str, rows: Sequence[ClusterRow], repeats: int) -> Table:
    lines = [
        (
            row.op,
            size_text(row.chunk_bytes),
            str(row.in_flight),
            row.path,
            f"{row.gb_per_s:.2f} GB/s",
            ratio_text(row.ratio, row.ratio_span),
        )
        if row.ms is None
        else (row.op, "", str(row.in_flight), row.path, f"{row.ms:.2f} ms", "")
        for row in rows
    ]
    heads = ("op", "object", "at once", "path", "speed", "of the socket")
    return Table(heads, lines, title=f"{kind}, medians of {repeats}", numeric=4)


@click.command()
@click.option("--lmcache", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True,
              help="The `lmcache` command.")  # fmt: skip
@click.option("--kind", "kinds", multiple=True, type=click.Choice([*STORES]), default=[*STORES], show_default=True)
@click.option("--size", "sizes", type=Bytes(), multiple=True, default=("32MiB", "4MiB", "512KiB"), show_default=True,
              help="Bytes of an object, repeatable.")  # fmt: skip
@click.option("--in-flight", type=click.IntRange(1, 64), multiple=True, default=(1, 4, 16), show_default=True,
              help="Objects at once, repeatable.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Samples per row.")
@click.option("--sample", "sample_bytes", type=Bytes(), default="128MiB", show_default=True, help="Bytes per sample.")
@click.option("--record-dir", type=click.Path(path_type=Path, file_okay=False, exists=True),
              help="Write cluster_KIND.json there.")  # fmt: skip
def cluster(lmcache: Path, kinds: tuple[str, ...], record_dir: Path | None, **given: Any) -> None:  # noqa: ANN401
    """A raw socket, a kind for clusters and LMCache's backend for the same store, in turn."""
    steps = len(kinds) * (len(given["sizes"]) * len(given["in_flight"]) + 1) * given["repeats"]
    with ended_by_signals(), progress("cluster", steps) as advance:
        for kind in kinds:
            with (
                tempfile.TemporaryDirectory(prefix="kvtier-cluster-") as root,
                STORES[kind](lmcache, Path(root)) as store,
                closing(Loopback(max(given["sizes"]))) as socket,
            ):
                rows = measure(store, socket, tick=lambda: advance(1), **given)
            print_table(_table(kind, rows, given["repeats"]))
            if record_dir is not None:
                results = {"kind": kind, "repeats": given["repeats"], "results": [asdict(row) for row in rows]}
                made = make_record("cluster", settings=recorded_settings(given), seed=None, results=results)
                write_json("--record-dir", record_dir / f"cluster_{kind}.json", made)


if __name__ == "__main__":
    run_script(cluster)
