"""The table of `bench/characterize.py`: figures as rows, backends and sizes as columns."""

from collections.abc import Callable, Sequence
from typing import Any

from kvtier.config.value_types import size_text

REQUESTS_LEAST = 100
"""Requests of the device below which only their number is shown."""
SEEN: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("payload, GB/s", lambda row: _with_range(row["objects"]["gb_per_s"], row["range"])),
    ("an object's read, p50 / p99", lambda row: _pair(row["objects"]["read_ms"], 1, "ms")),
    ("requests of the device", lambda row: f"{row['device']['requests']:,}"),
    ("for each object", lambda row: f"{row['requests_per_object']:.1f}"),
    ("written by kernel threads meanwhile", lambda row: _mib(row["amplification"]["unattributed_bytes"])),
    ("written afterwards, by a sync", lambda row: _mib(row["later_bytes"])),
)
"""Figures that every backend has: heading and text."""
SEEN_OF_REQUESTS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("written for each byte of payload", lambda row: f"{row['amplification']['device_ratio']:.4f}"),
    ("reads, of bytes", lambda row: f"{row['device']['read_share_bytes']:.0%}"),
    ("request size, p50 / p99", lambda row: _sizes(row["device"]["request_bytes"])),
    ("requests over 1 MB", lambda row: f"{row['device']['request_bytes']['share_over_1mb']:.0%}"),
    ("sequential, per process", lambda row: f"{row['device']['sequential_share']['per_process']:.0%}"),
    ("queue depth, mean / peak", lambda row: "{mean:.1f} / {peak:.0f}".format(**row["device"]["queue_depth"])),
    ("device latency, p50 / p99", lambda row: _pair(row["device"]["latency_us"], 1000, "ms")),
    ("peak over mean throughput", lambda row: f"{row['device']['burst_factor']:.2f}"),
)
"""Figures of a backend's requests of the device."""


def seen_table(record: dict[str, Any]) -> list[str]:
    """The conditions, and the lines of the table."""
    settings = {name: it["value"] for name, it in record["settings"].items()}
    rows = median_rows(record["results"]["results"])
    facts = next(iter(rows[0]["device"]["device_facts"].values()))
    repeats = settings.get("repeats", 1)
    how = f"Of {repeats} runs the one with the median GB/s, and the range" if repeats > 1 else "Each backend ran once"
    turns, load = settings["turns"], record["results"]["load_average"]
    heads = [f"{row['arm']}, {size_text(row['chunk_bytes'])}" for row in rows]
    lines = [f"| {head} | {' | '.join(text(row) for row in rows)} |" for head, text in SEEN]
    for head, text in SEEN_OF_REQUESTS:
        cells = [text(row) if row["device"]["requests"] >= REQUESTS_LEAST else "-" for row in rows]
        lines.append(f"| {head} | {' | '.join(cells)} |")
    return [
        (
            f"{settings['streams']} conversations of {turns} turns, {100 * (turns - 1) / (turns + 1):.0f} % reads, "
            f"{settings['threads']} threads or workers, requests of at most {facts['max_sectors_kb']} KiB. {how}. "
            f"The load average was {load[0]:.0f} at the start and {load[1]:.0f} at the end"
        ),
        f"| | {' | '.join(heads)} |",
        f"| --- |{' ---: |' * len(rows)}",
        *lines,
    ]


def median_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each backend and size the row with the median GB/s (of two the slower one), with the `range` of all."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["arm"], row["chunk_bytes"]), []).append(row)
    for same in found.values():
        same.sort(key=lambda row: row["objects"]["gb_per_s"])
    return [
        same[(len(same) - 1) // 2] | {"range": (same[0]["objects"]["gb_per_s"], same[-1]["objects"]["gb_per_s"])}
        for same in found.values()
    ]


def _with_range(value: float, ends: tuple[float, float]) -> str:
    return f"{value:.2f}" + ("" if ends[0] == ends[1] else " ({:.2f} to {:.2f})".format(*ends))


def _pair(it: dict[str, float], units: float, unit: str) -> str:
    return f"{it['p50'] / units:,.1f} / {it['p99'] / units:,.1f} {unit}"


def _sizes(it: dict[str, float]) -> str:
    return f"{size_text(int(it['p50']))} / {size_text(int(it['p99']))}"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
