"""`kvtier bench tier`: stores, loads and lookups through a tier's raw client, the tier and a session, in turn.

Every sample stores new objects, loads them, compares their bytes and deletes them. The order of the paths rotates with
each repeat, because a machine's speed drifts. Ratios are relative to the raw client (`bench.repeats.ratio`).
"""

import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvtier.config.sections import Config
from kvtier.config.value_types import size_text
from kvtier.errors import ConfigError, KvError
from kvtier.report.table import Table, print_table
from kvtier.tier.base import RawClient, Tier
from kvtier.tier.registry import TierSettings, kind_of
from kvtier.tools.bench.data_paths import (
    SESSION_NAMES,
    SMALL_BYTES,
    TIER_NAMES,
    ClientPath,
    SessionPath,
    frame_bytes_of,
    get,
    new_names,
    put,
)
from kvtier.tools.bench.repeats import Ratio, Span, ratio, ratio_text, repeated
from kvtier.tools.probe.tiers import ProbeTarget, Trial, choose_parent, open_trial, trial_place
from kvtier.types import ObjectName

SIZES = (4 << 20, 32 << 20)
IN_FLIGHT = (1, 4, 16)
SIZE_LEAST, SIZE_MOST = 4096, 1 << 30
SAMPLE_BYTES = 64 << 20
"""Least bytes of a sample. A sample also has at least two objects for each one in flight."""
LOOKUPS_IN_FLIGHT = 16
"""Number of concurrent writes while objects for lookups are stored."""
HELD = 3
"""Number of samples whose objects fit into a temporary store."""
SHARED_BYTES = 1 << 40
"""Capacity of a temporary store that many nodes could share. It counts deleted objects until its next sweep."""

Op = Literal["store", "load", "lookup"]
OPS: tuple[Op, ...] = ("store", "load")
RAW, TIER, SESSION = "raw", "tier", "session"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """The figures of one path, operation, size and number in flight. A GB is 10^9 bytes of payload."""

    tier: str
    kind: str
    op: Op
    chunk_bytes: int
    in_flight: int
    """Number of operations in flight, or of a session's threads; for a lookup, the number of names in a request."""
    path: str
    gb_per_s: float | None = None
    """Median rate; None for a lookup."""
    ms: float | None = None
    """Median of a lookup of `in_flight` names; None for other operations."""
    ratio: float | None = None
    """Speed divided by the raw client's; None without a raw client. For a lookup, the duration of one raw request
    divided by the duration of the lookup."""
    ratio_span: Span | None = None
    samples: tuple[float, ...] = ()
    """GB/s or ms of each repeat."""


@dataclass(frozen=True, slots=True)
class TierBenchResult:
    """All rows and the conditions of the measurement."""

    results: tuple[TierRow, ...]
    repeats: int
    sample_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBench:
    """A benchmark of one tier.

    Raises:
        ConfigError: a size is not allowed.
    """

    settings: TierSettings
    config: Config = field(default_factory=Config)
    """The configuration, of which only the secret is used."""
    sizes: Sequence[int] = SIZES
    """Payload bytes of a chunk."""
    in_flight: Sequence[int] = IN_FLIGHT
    repeats: int = 5
    """Samples of each row, without the first one, which is dropped."""
    sample_bytes: int = SAMPLE_BYTES
    load_at: Path | None = None
    """The tier's directory on another mount, as another node sees it. Loads and lookups use this mount."""

    def __post_init__(self) -> None:
        for size in self.sizes:
            if not SIZE_LEAST <= size <= SIZE_MOST or size % SIZE_LEAST:
                raise ConfigError(
                    f"--size {size}: a size must be a multiple of 4 KiB, and at most {size_text(SIZE_MOST)}"
                )

    @property
    def steps(self) -> int:
        """Number of times that `run` calls `advance`."""
        return len(self.sizes) * len(self.in_flight) * (self.repeats + 1) + 1

    def count(self, size: int, in_flight: int) -> int:
        """Return the number of objects in a sample."""
        return max(2 * in_flight, self.sample_bytes // size)

    def run(self, advance: Callable[[float], None] = lambda _steps: None) -> TierBenchResult:
        """Measure all rows. Remove all written objects at the end.

        Args:
            advance: called with 1 after each repeat of a size and number in flight.

        Raises:
            ConfigError: a setting of the tier is wrong.
            KvError: an operation failed, or returned bytes that differ from the stored ones.
        """
        largest = frame_bytes_of(max(*self.sizes, SMALL_BYTES))
        target = ProbeTarget(self.settings, self.config, is_configured=True)
        samples = [self.count(size, n) * frame_bytes_of(size) for size in self.sizes for n in self.in_flight]
        samples.append(SESSION_NAMES * frame_bytes_of(SMALL_BYTES))
        held = SHARED_BYTES if target.kind.is_shared(self.settings) else HELD * max(samples)
        rows: list[TierRow] = []
        with trial_place(target) as place, open_trial(target, place, held, largest) as trial:
            it = _Ends(trial.tier, trial.tier, raw := _raw_client(trial), raw)
            try:
                if self.load_at is not None:
                    it = self._with_reader(it, trial, place, held, largest)
                for size in self.sizes:
                    for in_flight in self.in_flight:
                        rows += self._speeds(it, size, in_flight, advance)
                rows += self._lookups(it)
                advance(1)
            except KvError:
                raise
            except Exception as error:  # noqa: BLE001 - a client library's; its text may contain the request
                why = error.strerror if isinstance(error, OSError) else None
                raise KvError(
                    f"the raw client of tier {self.settings.name!r} failed: {why or type(error).__name__}"
                ) from None
            finally:
                it.close()
        return TierBenchResult(tuple(rows), self.repeats, self.sample_bytes)

    def _with_reader(self, it: "_Ends", trial: Trial, place: Path, held: int, largest: int) -> "_Ends":
        """Return `it` with the tier and the raw client that load through `load_at`."""
        kind = kind_of(self.settings)
        assert self.load_at is not None
        there = choose_parent(self.load_at) / place.name
        if kind.open_trial is None or not kind.is_shared(self.settings) or not there.is_dir():
            raise ConfigError(
                f"--load-at {str(self.load_at)!r} is not the directory of {self.settings.label} on another mount, or "
                f"several nodes cannot share a tier of kind {kind.name}"
            )
        moved: dict[str, Any] = {kind.where: there / self.settings.name}
        settings = replace(self.settings, **moved)
        tier = kind.open_trial(settings, there / self.settings.name, held, largest)
        return it._replace(reader=tier, raw_reader=_raw_client(Trial(tier, settings, trial.context)))

    def _speeds(self, it: "_Ends", size: int, in_flight: int, advance: Callable[[float], None]) -> list[TierRow]:
        count = self.count(size, in_flight)
        with ExitStack() as stack:
            paths: dict[str, ClientPath | SessionPath] = {}
            if it.raw is not None and it.raw_reader is not None:
                paths[RAW] = ClientPath(it.raw.put, it.raw_reader.get, it.raw.delete, "the raw client", size, in_flight)
            paths[TIER] = ClientPath(
                partial(put, it.tier), partial(get, it.reader), it.tier.delete, "the tier", size, in_flight
            )
            remote = kind_of(self.settings).is_remote
            paths[SESSION] = session = SessionPath(it.tier, it.reader, size, in_flight, count, is_remote=remote)
            stack.callback(session.close)

            def once(repeat: int) -> dict[tuple[Op, str], float]:
                rates: dict[tuple[Op, str], float] = {}
                for name, path in list(paths.items())[:: 1 if repeat % 2 else -1]:
                    with _objects(path, count) as names:
                        rates["store", name] = count * size / path.store(names) / 1e9
                        rates["load", name] = count * size / path.load(names) / 1e9
                return rates

            found = repeated(once, self.repeats, warm_up=1, advance=advance)
        return [
            self._row(op, size, in_flight, path, {name: found[op, name] for name in paths})
            for op in OPS
            for path in paths
        ]

    def _lookups(self, it: "_Ends") -> list[TierRow]:
        """Measure lookups: of one name by the raw client, of several by the tier, and of a prompt by the session."""
        remote = kind_of(self.settings).is_remote
        path = SessionPath(it.tier, it.reader, SMALL_BYTES, LOOKUPS_IN_FLIGHT, SESSION_NAMES, is_remote=remote)
        raw = it.raw_reader
        try:
            with _objects(path, SESSION_NAMES) as names:
                path.store(names)

                def once(_repeat: int) -> dict[str, float]:
                    taken = {
                        SESSION: 1e3 * path.lookup(names),
                        TIER: _timed_ms(partial(it.reader.contains, new_names(TIER_NAMES))),
                    }
                    if raw is not None:
                        taken[RAW] = _timed_ms(partial(raw.has, new_names(1)[0]))
                    return taken

                found = repeated(once, self.repeats, warm_up=1)
        finally:
            path.close()
        asked = {RAW: 1, TIER: TIER_NAMES, SESSION: SESSION_NAMES}
        return [self._row("lookup", SMALL_BYTES, asked[path], path, found) for path in asked if path in found]

    def _row(self, op: Op, size: int, in_flight: int, path: str, found: Mapping[str, list[float]]) -> TierRow:
        samples, raw = found[path], found.get(RAW)
        middle, is_lookup = round(statistics.median(samples), 4), op == "lookup"
        against: Ratio | None = None
        if raw is not None:
            against = ratio(raw, samples) if is_lookup else ratio(samples, raw)
        return TierRow(
            tier=self.settings.name,
            kind=self.settings.kind,
            op=op,
            chunk_bytes=size,
            in_flight=in_flight,
            path=path,
            gb_per_s=None if is_lookup else middle,
            ms=middle if is_lookup else None,
            ratio=None if against is None else against.value,
            ratio_span=None if against is None else against.span,
            samples=tuple(round(sample, 4) for sample in samples),
        )


class _Ends(NamedTuple):
    """The tiers and raw clients that store, and those that load."""

    tier: Tier
    reader: Tier
    raw: RawClient | None
    raw_reader: RawClient | None

    def close(self) -> None:
        """Close everything except `tier`, which has another owner."""
        if self.reader is not self.tier:
            self.reader.close()
            if self.raw_reader is not None:
                self.raw_reader.close()
        if self.raw is not None:
            self.raw.close()


def show(result: TierBenchResult) -> None:
    """Print the rows."""
    rows = [
        (
            row.op,
            "" if row.op == "lookup" else size_text(row.chunk_bytes),
            f"{row.in_flight} names" if row.op == "lookup" else str(row.in_flight),
            row.path,
            f"{row.ms:.3f} ms" if row.ms is not None else f"{row.gb_per_s:.3f} GB/s",
            ratio_text(row.ratio, row.ratio_span),
        )
        for row in result.results
    ]
    first = result.results[0]
    title = f"{first.tier} ({first.kind}), medians of {result.repeats}"
    print_table(Table(("op", "chunk", "in flight", "path", "speed", "of raw"), rows, title=title, numeric=4))


def _raw_client(trial: Trial) -> RawClient | None:
    kind = kind_of(trial.settings)
    if kind.raw is None:
        return None
    settings = trial.settings
    if kind.open_trial is not None:
        place: dict[str, Any] = {kind.where: getattr(settings, kind.where).with_name("raw-client")}
        settings = replace(settings, **place)
    return kind.raw(settings, trial.context)


@contextmanager
def _objects(path: ClientPath | SessionPath, count: int) -> Generator[list[ObjectName]]:
    """Yield names for new objects, and delete the objects at the end."""
    names = new_names(count)
    try:
        yield names
    except BaseException:
        with suppress(Exception):
            path.delete(names)
        raise
    path.delete(names)


def _timed_ms(act: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - start_s)
