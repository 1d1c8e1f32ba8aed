"""Tiers as they are named on a command line, and what the outcome looks like as a table."""

import re

from kvtier.errors import ConfigError
from kvtier.plan.tables import Table
from kvtier.replay.links import TierSpec
from kvtier.replay.tables import tokens_text
from kvtier.replay.tiered import Latency, Tiered
from kvtier.size.units import binary, decimal, parse_figure

_SPEEDS: dict[str, tuple[float, float, float]] = {
    "host": (25e9, 25e9, 20e-6),
    "disk": (12e9, 6e9, 100e-6),
}
"""Bytes a second to read and to write, and latency, where they are not given: half of PCIe 5 x16; one PCIe 5 drive."""
_OTHER = (5e9, 5e9, 1e-3)
_TIME = re.compile(r"([0-9.]{1,12}) ?(us|ms|s)", re.ASCII)
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_tier(text: str) -> TierSpec:
    """A tier of ``disk=4TiB`` or ``disk=4TiB,read=12GB/s,write=6GB/s,latency=100us,shared``.

    Raises:
        ConfigError: it is written in another way.
    """
    head, *rest = [it.strip() for it in text.split(",")]
    name, _, size = head.partition("=")
    if not name or not size:
        raise ConfigError(f"--tier {text!r}; allowed: such as disk=4TiB,read=12GB/s,write=6GB/s,latency=100us,shared")
    read, write, latency_s = _SPEEDS.get(name, _OTHER)
    is_shared = False
    for part in rest:
        key, _, value = part.partition("=")
        if key == "read":
            read = _bytes(text, value.removesuffix("/s"))
        elif key == "write":
            write = _bytes(text, value.removesuffix("/s"))
        elif key == "latency":
            latency_s = _seconds(text, value)
        elif part == "shared":
            is_shared = True
        else:
            raise ConfigError(f"--tier {text!r}: {part!r} is unknown; allowed: read=, write=, latency=, shared")
    return TierSpec(
        name=name,
        capacity_bytes=round(_bytes(text, size)),
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        latency_s=latency_s,
        is_shared=is_shared,
    )


def tiers_table(told: Tiered) -> Table:
    """A row for each tier."""
    rows = tuple(
        (
            it.name,
            binary(it.capacity_bytes),
            f"{it.hit_rate:.4f}",
            tokens_text(it.hit_tokens),
            decimal(it.reads.total_bytes),
            f"{decimal(it.reads.mean_bytes_per_s)}/s",
            f"{decimal(it.reads.peak_bytes_per_s)}/s",
            f"{it.reads.mean_depth:.1f} / {it.reads.peak_depth}",
            decimal(it.writes.total_bytes),
            f"{decimal(it.writes.mean_bytes_per_s)}/s",
            f"{decimal(it.writes.peak_bytes_per_s)}/s",
            f"{it.writes_per_day:,.1f}",
        )
        for it in told.tiers
    )
    columns = (
        *("tier", "capacity", "hit rate", "hit tokens", "read", "mean", "peak", "depth mean/peak"),
        *("written", "mean", "peak", "fills a day"),
    )
    note = (
        "Hits by the place where the bytes lay. For host memory, what is read went to the engine and what is written "
        "came from it. A peak is that of a second."
    )
    return Table(title="Tiers", columns=columns, rows=rows, numeric=11, note=note)


def ttft_table(told: Tiered) -> Table:
    """With and without tiers."""

    def row(name: str, it: Latency, busy: float) -> tuple[str, ...]:
        return (name, *(f"{value:.3f}" for value in (it.mean_s, it.p50_s, it.p95_s, it.p99_s)), f"{busy:.0%}")

    rows = (
        row("without tiers", told.ttft_without, told.busy_share_without),
        row("with tiers", told.ttft, told.busy_share),
    )
    columns = ("time to first token, s", "mean", "p50", "p95", "p99", "prefill busy")
    return Table(title="Time to first token", columns=columns, rows=rows, numeric=5)


def _bytes(whole: str, text: str) -> float:
    try:
        figure = parse_figure(text)
    except ValueError as error:
        raise ConfigError(f"--tier {whole!r}: {text!r} is {error}") from None
    return figure.bytes(1024 if figure.is_binary else 1000)


def _seconds(whole: str, text: str) -> float:
    found = _TIME.fullmatch(text.strip())
    if found is None or found[1].count(".") > 1:
        raise ConfigError(f"--tier {whole!r}: latency {text!r}; allowed: such as 100us, 2ms or 1s")
    return float(found[1]) * _TIME_UNITS[found[2]]
