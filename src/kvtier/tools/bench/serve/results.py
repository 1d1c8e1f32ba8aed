"""The results of `kvtier bench serve`: figures of each run, medians over repetitions, cost and energy.

``--json`` prints the fields of `ArmResult`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvtier.report.format import digits
from kvtier.tools.bench.serve.join import (
    CACHED,
    COMPUTED,
    EXTERNAL,
    PLACES,
    RESIDENT,
    SOURCE_COUNTERS,
    JoinedRequest,
    JoinedRun,
    as_row,
    column_of,
    grown,
    is_covered,
    most,
    number,
)
from kvtier.tools.bench.serve.regret import REGRET
from kvtier.tools.run_record import RecordedSetting, make_record

SERIES_POINTS = 120
"""Most points of a series in a record. `seconds.json` of a run has all points."""
TURNS_MAX = 64
JOULES_PER_KWH = 3.6e6
TTFT_LIMIT_S = 1.0
"""Requests whose first token arrives within this time count as goodput. `kvtier plan` uses the same limit."""

Percentiles = dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """The figures of one run of one arm. None means unknown."""

    name: str
    repetition: int
    tier_ratio: float | None
    """R: KV bytes computed per second, divided by the tier's bytes per second; None if the drive is not throttled."""
    tier_bytes_per_s: float | None
    load: dict[str, float]
    """The values, except R, that differ between runs of one arm, such as the requested ``requests_per_s``."""
    status: str
    error: str | None
    seconds: float
    """Time from the start of the measured part to the end of its last request, even if that request failed."""
    requests: int
    """Requests that were sent in the measured part and did not fail."""
    failed: int
    """Requests that were sent in the measured part and failed."""
    requests_per_s: float | None
    output_tokens_per_s: float | None
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    queue_ms: Percentiles
    load_ms: Percentiles
    """Load times of the requests that loaded KV."""
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int | None
    """Prompt tokens that the engine computed; None if this is unknown for some of the requests."""
    tokens_by_place: dict[str, int] | None
    wrong_sums: int
    """Requests whose places are negative or do not add up to the prompt. No sum of places includes these requests."""
    unmatched: int
    """Requests without a line in the engine's log or in kvtier's."""
    skipped_lines: int
    loaded_bytes: int | None
    read_bytes: int | None
    """Bytes that the server's processes read from storage, until they were idle after the last request."""
    written_bytes: int | None
    """Bytes that the server's processes wrote to storage in the same time."""
    cpu_s: float | None
    """Processor time of the server's processes."""
    client_cpu_s: float | None
    rss_bytes: int | None
    """Peak resident memory of the server's processes. A page that several processes share counts once (PSS)."""
    memory_bytes: int | None
    """Peak memory of the control group, page cache included."""
    energy_j: float | None
    energy_source: str
    regret_ms: dict[str, float | None]
    """The number of `requests` whose regret is known, the `mean` and `p95` of regret, and its `share` of their TTFT."""
    by_turn: list[dict[str, Any]]
    hits_by_session: dict[str, float | None] | None = None
    """Figures of conversations with two or more requests: their number `sessions`, and the `min`, `median` and `max`
    share of their prompt tokens that was not computed. None in older records."""
    load_average: list[float] | None = None
    """The machine's one-minute load average before the server started and after it ended."""
    ttft_limit_s: float | None = None
    goodput_per_s: float | None = None
    """Requests per second whose first token arrived within `ttft_limit_s`."""
    series: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    """Series over time, only in the run of each arm that `keep_series` chooses."""

    @property
    def point(self) -> tuple[tuple[tuple[str, float], ...], float]:
        """The load and R (`docs/benchmarks.md`) that all repetitions share. R is 0 if the drive is not throttled."""
        return tuple(sorted(self.load.items())), self.tier_ratio or 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over repetitions."""

    median: float
    low: float
    high: float

    def text(self, show: Callable[[float], str] = digits) -> str:
        """Return the median as text, with the smallest and the largest value if there are several."""
        middle = show(self.median)
        return middle if self.low == self.high else f"{middle} ({show(self.low)} to {show(self.high)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Stated prices, all in the same currency."""

    machine_hour: float | None = None
    kwh: float | None = None
    """Price of a kilowatt-hour; None if the price of the machine's hour includes energy."""


def arm_result(run: JoinedRun, ttft_limit_s: float = TTFT_LIMIT_S) -> ArmResult:
    """Return the figures of one run. `ttft_limit_s` is the limit of goodput."""
    facts, samples = run.files.run, run.files.samples
    counted = [it for it in run.requests if it.error is None and it.first_s is not None and it.ended_s is not None]
    until_s = max((it.ended_s for it in run.requests if it.ended_s is not None), default=run.until_s)
    seconds = max(until_s - run.since_s, 0.0)
    output = sum(it.output_tokens or 0 for it in counted)
    places = _places(run, counted)
    placed = sum(it.tokens_by_place is not None and not it.is_sum_wrong for it in counted)

    # Writes continue after the last answer. Sampling continues until the drive has them.
    quiet_s = max(until_s, samples[-1]["time_s"]) if samples else until_s

    def grew(name: str, end_s: float = until_s) -> float | None:
        return grown(samples, name, run.since_s, end_s)

    energy_j, source = _energy(run, until_s)
    logs = [log for log in (run.files.engine, run.files.kvtier) if log is not None]
    loaded = [it.loaded_bytes for it in counted if it.loaded_bytes is not None]
    error = facts.get("error")
    return ArmResult(
        name=run.files.arm,
        repetition=int(number(facts, "repetition") or 0),
        tier_ratio=number(facts, "tier_ratio"),
        tier_bytes_per_s=number(facts, "tier_bytes_per_s"),
        load={name: value for name in as_row(facts.get("load")) if (value := number(facts["load"], name)) is not None},
        status=str(facts.get("status", "failed")),
        error=None if error is None else str(error),
        seconds=seconds,
        requests=len(counted),
        failed=len(run.requests) - len(counted),
        requests_per_s=len(counted) / seconds if counted and seconds else None,
        output_tokens_per_s=output / seconds if counted and seconds else None,
        ttft_ms=_percentiles(it.ttft_s for it in counted),
        tpot_ms=_percentiles(it.tpot_s for it in counted),
        queue_ms=_percentiles(it.queue_s for it in counted),
        load_ms=_percentiles(it.load_s for it in counted if it.loaded_bytes),
        prompt_tokens=sum(it.prompt_tokens or 0 for it in counted),
        output_tokens=output,
        computed_tokens=None if places is None or 0 < placed < len(counted) else places.get(COMPUTED, 0),
        tokens_by_place=places,
        wrong_sums=sum(it.is_sum_wrong for it in counted),
        unmatched=sum(any(it.id not in log for log in logs) for it in counted),
        skipped_lines=sum(run.files.skipped.values()),
        loaded_bytes=sum(loaded) if loaded else None,
        read_bytes=_whole(grew("read_bytes", quiet_s)),
        written_bytes=_whole(grew("written_bytes", quiet_s)),
        cpu_s=grew("cpu_s"),
        client_cpu_s=grew("client_cpu_s"),
        rss_bytes=_whole(most(samples, "rss_bytes", run.since_s, until_s)),
        memory_bytes=_whole(most(samples, "memory_bytes", run.since_s, until_s)),
        energy_j=energy_j,
        energy_source=source,
        regret_ms=_regret(counted),
        by_turn=_by_turn(counted),
        hits_by_session=_by_session(counted),
        load_average=facts.get("load_average"),
        ttft_limit_s=ttft_limit_s,
        goodput_per_s=sum((it.ttft_s or 0.0) <= ttft_limit_s for it in counted) / seconds
        if counted and seconds
        else None,
        series=_thinned(run.seconds),
    )


def keep_series(results: Sequence[ArmResult]) -> list[ArmResult]:
    """Return the results, with series in only one run per arm: the highest load, lowest R and first repetition."""
    kept: dict[str, ArmResult] = {}
    for it in sorted(results, key=lambda it: ([-value for _, value in it.point[0]], it.point[1], it.repetition)):
        if it.series and it.status == "ok":
            kept.setdefault(it.name, it)
    return [it if kept.get(it.name) is it else replace(it, series={}) for it in results]


def serve_record(
    runs: Sequence[JoinedRun],
    *,
    settings: dict[str, RecordedSetting],
    seed: int | None,
    conditions: dict[str, object],
    directory: Path | None = None,
    ttft_limit_s: float = TTFT_LIMIT_S,
) -> dict[str, object]:
    """Return the record of a benchmark.

    Args:
        runs: the runs of all arms.
        settings: the benchmark's settings and their origins, by name.
        seed: seed of the workload.
        conditions: text for the report about model, workload, limits and arms: a string, or an object of strings.
        directory: a directory on the drive of the tiers.
        ttft_limit_s: limit of goodput.
    """
    results = {
        "conditions": conditions,
        "definitions": {"places": PLACES, "regret": REGRET},
        "arms": keep_series([arm_result(it, ttft_limit_s) for it in runs]),
    }
    return make_record("serve", settings=settings, seed=seed, results=results, directory=directory)


def read_results(record: dict[str, Any]) -> list[ArmResult]:
    """Read the arms of a record of `kvtier bench serve`."""
    return [it if isinstance(it, ArmResult) else ArmResult(**it) for it in record["results"]["arms"]]


def repetitions(results: Iterable[ArmResult]) -> dict[tuple[str, Any], list[ArmResult]]:
    """Group the completed runs by arm and `ArmResult.point`."""
    grouped: dict[tuple[str, Any], list[ArmResult]] = {}
    for it in results:
        if it.status == "ok" and it.requests:
            grouped.setdefault((it.name, it.point), []).append(it)
    return grouped


def spread(runs: Iterable[ArmResult], figure: Callable[[ArmResult], float | None]) -> Spread | None:
    """Return the spread of a figure over the runs in which it is known."""
    known = [value for it in runs if (value := figure(it)) is not None]
    return Spread(median(known), min(known), max(known)) if known else None


def unit_cost(run: ArmResult, prices: Prices) -> dict[str, float | None]:
    """Return the cost and energy of a run's tokens. A figure is None if a price or the energy is unknown.

    With a price of energy the cost covers the machine's hours and the measured energy. Without one it covers the
    machine's hours alone. A million tokens cost ``(hours * machine_hour + energy in kWh * kwh) / tokens * 1e6``.
    """
    output, everything = run.output_tokens, run.output_tokens + run.prompt_tokens
    kwh = None if run.energy_j is None else run.energy_j / JOULES_PER_KWH
    bill: float | None = None
    if prices.kwh is None:
        bill = None if prices.machine_hour is None else prices.machine_hour * run.seconds / 3600
    elif kwh is not None:
        bill = (prices.machine_hour or 0.0) * run.seconds / 3600 + kwh * prices.kwh
    return {
        "joules_per_output_token": run.energy_j / output if run.energy_j is not None and output else None,
        "kwh_per_million_output_tokens": kwh / output * 1e6 if kwh is not None and output else None,
        "per_million_output_tokens": bill / output * 1e6 if bill is not None and output else None,
        "per_million_tokens": bill / everything * 1e6 if bill is not None and everything else None,
    }


def hit_share(places: dict[str, int] | None) -> float | None:
    """Return the share of the prompt tokens that was not computed."""
    total = sum((places or {}).values())
    return 1 - (places or {}).get(COMPUTED, 0) / total if total else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _percentiles(values_s: Iterable[float | None]) -> Percentiles:
    known = [1e3 * value for value in values_s if value is not None]
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {name: float(np.quantile(known, share)) if known else None for name, share in shares.items()}


def _sum_places(requests: Iterable[JoinedRequest]) -> dict[str, int] | None:
    total: Counter[str] = Counter()
    for it in requests:
        total.update({} if it.is_sum_wrong else it.tokens_by_place or {})
    return dict(total) or None


def _places(run: JoinedRun, counted: Sequence[JoinedRequest]) -> dict[str, int] | None:
    """Return tokens by place, with `CACHED` split in the ratio of the engine's counters over the same time."""
    total = _sum_places(counted)
    counters = {
        name: grown(run.files.samples, f"metrics.{counter}", run.since_s, run.until_s)
        for name, counter in SOURCE_COUNTERS.items()
    }
    if total is None:
        # A server started elsewhere has no logs here. Its counters include requests that began or ended outside.
        return {name: round(value) for name, value in counters.items() if value is not None} or None
    resident, external = counters[RESIDENT], counters[EXTERNAL]
    if CACHED in total and resident is not None and external is not None and resident + external:
        cached = total.pop(CACHED)
        total[RESIDENT] = round(cached * resident / (resident + external))
        total[EXTERNAL] = cached - total[RESIDENT]
    return total


def _energy(run: JoinedRun, until_s: float) -> tuple[float | None, str]:
    """Return joules, and the names of what was measured.

    A GPU's joules come from its counter, or else from its power over time. A processor's come from its counter.
    """
    samples, since_s = run.files.samples, run.since_s
    found = {"GPU": grown(samples, "gpu.joules", since_s, until_s)}
    if found["GPU"] is None:
        times, watts = column_of(samples, "gpu.watts")
        inside = [watt for at_s, watt in zip(times, watts, strict=True) if since_s <= at_s <= until_s]
        is_measured = bool(inside) and is_covered(times, since_s, until_s)
        found["GPU"] = sum(inside) / len(inside) * (until_s - since_s) if is_measured else None
    found["processor"] = grown(samples, "package_joules", since_s, until_s)
    known = {name: joules for name, joules in found.items() if joules is not None}
    return (sum(known.values()), " and ".join(known)) if known else (None, "unknown: no meter")


def _regret(counted: Sequence[JoinedRequest]) -> dict[str, float | None]:
    known = [(it.regret_s, it.ttft_s or 0.0) for it in counted if it.regret_s is not None]
    if not known:
        return {"requests": 0, "mean": None, "p95": None, "share": None}
    regrets = [1e3 * regret_s for regret_s, _ in known]
    waited = sum(ttft_s for _, ttft_s in known)
    return {
        "requests": len(known),
        "mean": float(np.mean(regrets)),
        "p95": float(np.quantile(regrets, 0.95)),
        "share": sum(regrets) / 1e3 / waited if waited else None,
    }


def _by_turn(counted: Sequence[JoinedRequest]) -> list[dict[str, Any]]:
    """Return the requests, the median TTFT and the tokens by place of each turn of the conversations."""
    turns = sorted({it.turn for it in counted if it.turn is not None})[:TURNS_MAX]
    rows: list[dict[str, Any]] = []
    for turn in turns:
        own = [it for it in counted if it.turn == turn]
        times = _percentiles(it.ttft_s for it in own)
        rows.append({"turn": turn, "requests": len(own), "ttft_ms": times, "tokens_by_place": _sum_places(own)})
    return rows


def _by_session(counted: Sequence[JoinedRequest]) -> dict[str, float | None]:
    """Compute `ArmResult.hits_by_session`."""
    sessions = {it.user: [own for own in counted if own.user == it.user] for it in counted if it.user is not None}
    shares = [hit_share(_sum_places(own)) for own in sessions.values() if len(own) > 1]
    known = [share for share in shares if share is not None]
    found = (min(known), median(known), max(known)) if known else (None, None, None)
    return {"sessions": len(known)} | dict(zip(("min", "median", "max"), found, strict=True))


def _thinned(seconds: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    """Average adjacent values until at most `SERIES_POINTS` are left. Round the values to four digits."""
    count = len(seconds.get("at_s", ()))
    width = -(-count // SERIES_POINTS) if count else 1
    out: dict[str, list[float | None]] = {}
    for name, values in seconds.items():
        parts = [values[start : start + width] for start in range(0, count, width)]
        means = [[value for value in part if value is not None] for part in parts]
        out[name] = [float(f"{sum(part) / len(part):.4g}") if part else None for part in means]
    return out
