"""Sums up a record of `kvtier bench serve` in figures for charts and in a few sentences."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from kvtier.report.format import NONE, digits, share_text
from kvtier.tools.bench.serve.join import NO_CONNECTOR
from kvtier.tools.bench.serve.results import ArmResult, Prices, Spread, read_results, repetitions, spread

OWN = "kvtier"
SAME = 1.03
"""Two figures count as equal if their ratio is smaller than this."""
REQUESTS_LEAST = 30
"""A verdict needs this many requests per arm, over all its runs.

The 95 % interval of a median extends from the 10th to the 21st of 30 requests. For 6 requests it is the whole range
(ranks from the binomial distribution)."""
Point = tuple[tuple[tuple[str, float], ...], float]
"""A load and R, as in `ArmResult.point`."""
Figure = Callable[[ArmResult], float | None]


@dataclass(frozen=True, slots=True)
class ServeRecord:
    """The arms of one record, with the figures that the charts draw."""

    results: list[ArmResult]
    conditions: dict[str, Any]
    definitions: dict[str, str]
    machine: dict[str, Any]
    prices: Prices = field(default_factory=Prices)

    @classmethod
    def of(cls, record: dict[str, Any], prices: Prices | None = None) -> "ServeRecord":
        """Read the arms of a record that `serve_record` made."""
        inside = record["results"]
        parts = inside["conditions"], inside["definitions"], record["machine"]
        return cls(read_results(record), *parts, prices or Prices())

    @property
    def names(self) -> list[str]:
        """The names of the arms: no connector first, kvtier last."""
        found = dict.fromkeys(it.name for it in self.results)
        return sorted(found, key=lambda it: (it != NO_CONNECTOR, it == OWN))

    @property
    def plain(self) -> str | None:
        """The baseline: the arm without a connector, or else the first arm."""
        names = self.names
        return NO_CONNECTOR if NO_CONNECTOR in names else names[0] if len(names) > 1 else None

    @property
    def points(self) -> list[Point]:
        """Pairs of load and R, in ascending order."""
        return sorted({it.point for it in self.results})

    @property
    def ratios(self) -> list[float]:
        """Values of R of all runs; 0 means a drive without a limit."""
        return sorted({it.tier_ratio or 0.0 for it in self.results})

    @property
    def own(self) -> str | None:
        """The arm that the answer is about: kvtier, or else the last arm."""
        names = [name for name in self.names if name != self.plain]
        return OWN if OWN in names else names[-1] if names else None

    @property
    def top(self) -> Point:
        """The load and R of the answer: the highest load, and then the smallest R, with figures of both arms."""
        own = {point for name, point in repetitions(self.results) if name == self.own}
        both = {point for point in own if self.plain and self.at(self.plain, point, p50_ms)}
        points = both or own or set(self.points)
        load = max(load for load, _ in points)
        return load, min(ratio for other, ratio in points if other == load)

    def label(self, name: str) -> str:
        """Return an arm's label. It says if the copies of native tiering are not vLLM's own."""
        if name == "native":
            return "native (memcpy stand-in)" if "memcpy" in str(self.conditions) else "native tiering"
        return {NO_CONNECTOR: "without", "lmcache": "LMCache"}.get(name, name)

    def runs_at(self, name: str, point: Point) -> list[ArmResult]:
        """Return an arm's complete runs at a load and R. An arm that uses no drive has the same runs for every R."""
        grouped = repetitions(self.results)
        runs = grouped.get((name, point))
        if runs is None:
            others = [own for (arm, (load, _)), own in grouped.items() if arm == name and load == point[0]]
            throttled = any(run.tier_ratio for own in grouped.values() for run in own if run.name == name)
            runs = others[0] if len(others) == 1 and not throttled else []
        return runs

    def at(self, name: str, point: Point, figure: Figure) -> Spread | None:
        """Return the spread of an arm's figure over the runs of `runs_at`."""
        return spread(self.runs_at(name, point), figure)

    def requests(self, names: Sequence[str], point: Point) -> int:
        """Return how many requests succeeded at `point` over all runs of that arm among `names` with the fewest."""
        return min(sum(run.requests for run in self.runs_at(name, point)) for name in names)


def p50_ms(run: ArmResult) -> float | None:
    """Return the median time to first token."""
    return run.ttft_ms["p50"]


def p95_ms(run: ArmResult) -> float | None:
    """Return the 95th percentile of the time to first token."""
    return run.ttft_ms["p95"]


goodput_per_s: Figure = attrgetter("goodput_per_s")
"""Requests per second whose first token arrived in time."""
tokens_per_s: Figure = attrgetter("output_tokens_per_s")
"""Output tokens per second."""
requests_per_s: Figure = attrgetter("requests_per_s")
"""Successful requests per second."""


def headline(served: ServeRecord) -> str:
    """Return the result as a heading."""
    plain, own = served.plain, served.own
    if plain is None or own is None:
        return "Served conversations"
    ours, theirs = served.at(own, served.top, p50_ms), served.at(plain, served.top, p50_ms)
    if ours is None or theirs is None:
        return "Served conversations"
    against = "without" if plain == NO_CONNECTOR else f"with {served.label(plain)}"
    if few := _too_few(served, own, plain):
        return f"With {own} and {against}: {few}"
    faster = _by_run(served, own, plain)
    text = f"With {own} the first token comes {_times(theirs, ours, faster)} as {against}"
    others = {name: served.at(name, served.top, p50_ms) for name in served.names if name not in (own, plain)}
    found = [(it.median, name) for name, it in others.items() if it and not _too_few(served, name, plain)]
    best, name = min(found, default=(ours.median, ""))
    if best * SAME < ours.median and (behind := others[name]):
        text += f", with {served.label(name)} {_times(theirs, behind, _by_run(served, name, plain))}"
    return f"{text} ({_evidence(served, own, plain, faster)})"


def answer(served: ServeRecord) -> str:
    """Return the result in one or two sentences."""
    plain, own = served.plain, served.own
    if plain is None or own is None:
        return "One arm only: there is nothing to compare with."
    point = served.top
    ours, theirs = served.at(own, point, p50_ms), served.at(plain, point, p50_ms)
    if ours is None or theirs is None:
        return f"No complete runs of both {own} and {plain}: there is nothing to compare."
    times = f"{ms_text(ours.median)}, against {ms_text(theirs.median)} {served.label(plain)}"
    place = _place_text(served, point)
    start = f"At {place}, with {own}" if place else f"With {own}"
    faster = _by_run(served, own, plain)
    verdict = _too_few(served, own, plain) or f"{_times(theirs, ours, faster)}; {_evidence(served, own, plain, faster)}"
    text = f"{start} the median time to first token is {times} ({verdict})"
    rates = [served.at(name, point, tokens_per_s) for name in (own, plain)]
    if rates[0] and rates[1]:
        text += f", at {digits(rates[0].median)} against {digits(rates[1].median)} output tokens/s"
    others = [name for name in served.names if name not in (own, plain)]
    beside = [(name, it) for name in others if (it := served.at(name, point, p50_ms))]
    if beside:
        text += "; " + ", ".join(f"{served.label(name)} {ms_text(it.median)}" for name, it in beside)
    further = _failed_text(served), sweep_text(served, own, plain), behind_text(served, own)
    return " ".join(filter(None, (f"{text}.", *further)))


def _too_few(served: ServeRecord, own: str, plain: str) -> str:
    """Return why there is no verdict, or an empty string if there are enough requests."""
    count = served.requests((own, plain), served.top)
    return f"too few requests for a verdict (n = {count})" if count < REQUESTS_LEAST else ""


def _by_run(served: ServeRecord, own: str, plain: str) -> list[float]:
    """Return the speed-ups of `own` over `plain` in the repetitions that both completed, in ascending order."""
    ours, theirs = (
        {run.repetition: value for run in served.runs_at(name, served.top) if (value := p50_ms(run))}
        for name in (own, plain)
    )
    return sorted(theirs[number] / ours[number] for number in ours.keys() & theirs.keys())


def _evidence(served: ServeRecord, own: str, plain: str, faster: Sequence[float]) -> str:
    """Return a verdict's evidence: the ratio's span, requests, load average, and whether KV was loaded."""
    ours, theirs = (served.runs_at(name, served.top) for name in (own, plain))
    parts: list[str] = []
    if len(faster) > 1:
        ends = sorted(1 / it for it in faster) if faster[-1] < 1 else faster
        parts.append(f"{_ratio_text(ends[0])} to {_ratio_text(ends[-1])} over the runs")
    runs = min(len(ours), len(theirs))
    parts.append(f"n = {served.requests((own, plain), served.top):,} in {runs} run{'' if runs == 1 else 's'} each")
    loads = [value for run in (*ours, *theirs) for value in run.load_average or ()]
    parts.append(f"load average {digits(min(loads))} to {digits(max(loads))}" if loads else "load average not recorded")
    if all(run.loaded_bytes == 0 for run in ours):
        parts.append(f"{own} loaded nothing")
    return ", ".join(parts)


def _failed_text(served: ServeRecord) -> str:
    """Return each arm's share of failed requests at the point of the answer, or an empty string if none failed."""
    found = {
        name: served.at(name, served.top, lambda run: run.failed / (run.failed + run.requests)) for name in served.names
    }
    if not any(it and it.high for it in found.values()):
        return ""
    shares = [f"{served.label(name)} {it.text(share_text)}" for name, it in found.items() if it]
    return f"Requests that failed are in no figure: {', '.join(shares)}."


def sweep_text(served: ServeRecord, own: str, plain: str) -> str:
    """Return a sentence on the values of R at which `own` is faster than `plain`, and at which it is not.

    The string is empty if the drive was never throttled.
    """
    load = served.top[0]
    verdicts: dict[str, list[float]] = {}
    least = math.inf
    for ratio in served.ratios:
        ours, theirs = served.at(own, (load, ratio), p50_ms), served.at(plain, (load, ratio), p50_ms)
        if ours and theirs and ratio:
            count = served.requests((own, plain), (load, ratio))
            few = f"has too few requests for a verdict (n = {count})"
            verdicts.setdefault(few if count < REQUESTS_LEAST else _verdict(ours, theirs), []).append(ratio)
            least = min(least, count)
    if not verdicts:
        return ""
    said = [f"{verdict} at R = {joined([f'{ratio:g}' for ratio in ratios])}" for verdict, ratios in verdicts.items()]
    return f"With a throttled drive {own} {joined(said)} (n = {least:.0f} or more)."


def behind_text(served: ServeRecord, own: str) -> str:
    """Return a sentence on where another arm was better than `own` by more than `SAME`.

    The string is empty if nothing can be compared.
    """
    cells: list[str] = []
    compared = 0
    for point in served.points:
        for word, figure, sign in (("median", p50_ms, 1), ("p95", p95_ms, 1), ("goodput", goodput_per_s, -1)):
            ours = served.at(own, point, figure)
            others = {
                name: it.median for name in served.names if name != own and (it := served.at(name, point, figure))
            }
            if ours is None or not others:
                continue
            name = min(others, key=lambda it: sign * others[it])
            compared += served.requests((own, name), point) >= REQUESTS_LEAST
            pair = ours.median, others[name]
            worse, better = pair if sign > 0 else pair[::-1]
            if worse > better * SAME and served.requests((own, name), point) >= REQUESTS_LEAST:
                texts = [ms_text(it) if sign > 0 else f"{digits(it)}/s" for it in pair]
                place = _place_text(served, point)
                cells.append(
                    f"{word}{f' at {place}' if place else ''}, {texts[0]} against {texts[1]} {served.label(name)}"
                )
    if not compared:
        return ""
    share = f"by more than {SAME - 1:.0%}"
    return f"{own} is behind {share} here: {'; '.join(cells)}." if cells else f"{own} is nowhere behind {share}."


def _place_text(served: ServeRecord, point: Point) -> str:
    """Name the load if there are several, and R if the drive was throttled."""
    load = [load_text(dict(point[0]))] if len({load for load, _ in served.points}) > 1 else []
    return joined([*load, *([f"R = {point[1]:g}"] if point[1] else [])])


def _verdict(ours: Spread, theirs: Spread) -> str:
    if 1 / SAME < ours.median / theirs.median < SAME:
        return "is as fast"
    if ours.high < theirs.low:
        return "is faster"
    return "is slower" if ours.low > theirs.high else "differs by less than its runs do"


def load_text(load: Mapping[str, float]) -> str:
    """Return the load of a run in words, such as ``2 requests/s, 8 users``."""
    words = {"requests_per_s": "requests/s", "share_of_capacity": "of capacity", "users": "users"}
    return ", ".join(f"{value:g} {words.get(name, name.replace('_', ' '))}" for name, value in load.items()) or "-"


def ms_text(value: float | None) -> str:
    """Format a time in milliseconds, or in seconds from two seconds on."""
    if value is None:
        return NONE
    return f"{digits(value)} ms" if value < 2000 else f"{value / 1e3:.3g} s"


def _times(before: Spread, after: Spread, faster: Sequence[float]) -> str:
    if not after.median or not before.median:
        return NONE
    if 1 / SAME < before.median / after.median < SAME:
        return "as fast"
    if len(faster) > 1 and faster[0] < 1 < faster[-1]:
        return "about as fast"  # one repetition was faster, another slower
    ratio = max(before.median / after.median, after.median / before.median)
    return f"{_ratio_text(ratio)} times as {'fast' if before.median > after.median else 'slow'}"


def _ratio_text(ratio: float) -> str:
    return digits(ratio, 2 if ratio >= 2 else 3)


def joined(texts: Sequence[str]) -> str:
    """Join strings with commas and an "and"."""
    return ", ".join(texts[:-1]) + f" and {texts[-1]}" if len(texts) > 1 else "".join(texts)
