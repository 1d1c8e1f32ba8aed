"""Builds the report of `kvtier bench serve`."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from kvtier.report.format import NONE, bytes_text, decimal, digits, share_text
from kvtier.report.table import Table
from kvtier.tools.bench.serve.join import CACHED, COMPUTED, EXTERNAL, NO_CONNECTOR, RESIDENT, as_row
from kvtier.tools.bench.serve.results import ArmResult, Spread, hit_share, repetitions, spread, unit_cost
from kvtier.tools.bench.serve.summary import (
    OWN,
    Figure,
    ServeRecord,
    answer,
    goodput_per_s,
    headline,
    joined,
    load_text,
    ms_text,
    p50_ms,
    p95_ms,
    requests_per_s,
    tokens_per_s,
)
from kvtier.tools.charts.chart import DASHED, Axis, Bars, Chart, Charts, Curve, Dash, Rule, few, stacked
from kvtier.tools.charts.report import PageSection, Report

_HUES = {NO_CONNECTOR: "computed", "native": "shared", "lmcache": "gpu", OWN: "tiered"}
_OTHER_HUES = ("disk", "host", "ink")
_LOOKS: dict[str, tuple[str, Dash]] = {
    NO_CONNECTOR: ("s", (0, (1, 1.5))),
    "native": ("D", DASHED),
    "lmcache": ("^", (0, (7, 2, 1, 2))),
}
"""Marker and line style of each arm. Other arms have a circle and a solid line."""
_PLACE_HUES = {COMPUTED: "line", RESIDENT: "gpu", "host": "host", "disk": "disk", EXTERNAL: "shared", CACHED: "shared"}
TIMES = (p50_ms, p95_ms)
LABELS: dict[Figure, str] = {
    p50_ms: "median ms to the first token",
    p95_ms: "p95 of the ms to the first token",
    goodput_per_s: "requests/s with a first token in time",
    tokens_per_s: "output tokens/s",
}
"""Labels of the axes."""
MARGIN = 1.15
"""An axis extends beyond its values by this factor."""
LOGARITHMIC_FROM = 10.0
"""An axis of load is logarithmic if the largest median exceeds the smallest by this factor."""
SERIES = (
    ("reads", "Reads from storage", (("read_gb_per_s", ""),), "bytes a second"),
    ("writes", "Writes to storage", (("write_gb_per_s", ""),), "bytes a second"),
    ("depth", "Queue depth of the drive", (("queue_depth", ""),), "requests in the device's queue"),
    ("throughput", "Output tokens", (("output_tokens_per_s", ""),), "output tokens/s"),
    ("cpu", "Processor of the server", (("cpu_cores", ""),), "cores"),
    ("watts", "Power", (("gpu_watts", "GPU"), ("package_watts", "processor")), "W"),
)
"""Charts over time. Each has a name, a heading, labeled columns and a unit."""
COSTS = {
    "per_million_output_tokens": "cost, output tokens",
    "per_million_tokens": "cost, all tokens",
    "kwh_per_million_output_tokens": "kWh, output tokens",
    "joules_per_output_token": "J per output token",
}
"""Figures of `unit_cost`, and the headings of their columns."""


def serve_report(served: ServeRecord) -> Report:
    """Build the report of a record. If prices are stated, the cost is shown with the answer, not only on the page."""
    cost = [cost_table(served)]
    is_priced = (served.prices.machine_hour, served.prices.kwh) != (None, None)
    timed = joined([run_name(it) for it in served.results if it.series])
    over_time = (
        f"One run of each arm: {timed}. Reads and writes are the server's own where they are known, else the drive's. "
        "Queue depth is the drive's, with what other processes did."
    )
    facts = Table(("", ""), conditions(served), title="Conditions")
    return Report(
        command="kvtier bench serve",
        answer=headline(served),
        sections=[
            PageSection(
                texts=[answer(served)],
                charts=partial(answer_charts, served),
                notes=list(notes(served)),
                tables=[arms_table(served), work_table(served), *(cost if is_priced else [])],
            ),
            PageSection(title="Where the tokens came from", charts=partial(place_charts, served), is_page_only=True),
            PageSection(
                title="Over time" if timed else "",
                texts=[over_time] if timed else [],
                charts=partial(series_charts, served),
                is_page_only=True,
            ),
            PageSection(tables=[*([] if is_priced else cost), facts, runs_table(served)], is_page_only=True),
            PageSection(title="Definitions", notes=list(served.definitions.values()), is_page_only=True),
        ],
        remark=f"{served.machine.get('processor', '')}, {served.machine.get('cores', '?')} cores.",
    )


def conditions(served: ServeRecord) -> list[tuple[str, str]]:
    """Return the conditions of the figures, each as a name and a string."""
    found: list[tuple[str, str]] = []
    varied = {name for it in served.results for name in it.load}
    for name, value in served.conditions.items():
        inner = as_row(value)
        if "sizes" in inner:  # leave out a size that differs between runs
            inner = inner | {"sizes": {size: it for size, it in as_row(inner["sizes"]).items() if size not in varied}}
        found.append((name.replace("_", " "), _flat(inner or value)))
    found.append(("requests a second", "; ".join(_rates(served))))
    facts = served.machine
    memory = bytes_text(facts["memory_bytes"]) if "memory_bytes" in facts else "?"
    machine = f"{facts.get('processor', '?')}, {facts.get('cores', '?')} cores, {memory} of memory, "
    return [*found, ("machine", machine + f"{facts.get('system', '?')}, {facts.get('file_system', '?')}")]


def _rates(served: ServeRecord) -> Iterator[str]:
    """Yield the requested rate of each load, and the rate that each arm reached."""
    preset = as_row(as_row(served.conditions.get("workload")).get("sizes")).get("requests_per_s")
    for load in sorted({load for load, _ in served.points}):
        asked = dict(load).get("requests_per_s", preset)
        ran = [
            f"{served.label(name)} {found.text()}"
            for name in served.names
            if (
                found := spread(
                    (it for it in served.results if it.name == name and it.point[0] == load), requests_per_s
                )
            )
        ]
        yield f"{'as recorded' if asked is None else f'{asked:g} asked for'}, ran at {', '.join(ran) or NONE}"


def _flat(value: object) -> str:
    """Format a JSON object and its inner objects as ``name value, name value``."""
    inner = as_row(value)
    return ", ".join(f"{key.replace('_', ' ')} {_flat(it)}" for key, it in inner.items()) if inner else str(value)


def notes(served: ServeRecord) -> Iterator[str]:
    """Yield notes on the limits of the figures."""
    for it in served.results:
        if it.status != "ok":
            done = f"{it.requests} of {it.requests + it.failed} requests completed; " if it.failed else ""
            yield f"{run_name(it)} failed: {done}{it.error or 'unknown error'}. Its figures are left out."
        elif not it.requests:
            yield f"{run_name(it)}: no request succeeded. The run has no figures."
    failed = {run_name(it): it.failed for it in served.results if it.failed}
    each = ", ".join(f"{name} {count:,}" for name, count in failed.items())
    counts = (
        (
            sum(it.wrong_sums for it in served.results),
            "requests have places that do not add up to their prompt; no sum of places includes them",
        ),
        (
            sum(it.unmatched for it in served.results),
            "requests have no line in a server's log; their places and regret are unknown",
        ),
        (sum(failed.values()), f"requests failed; they are in no figure but this one: {each}"),
        (sum(it.skipped_lines for it in served.results), "torn lines were left out"),
    )
    yield from (f"{count:,} {text}." for count, text in counts if count)


def arms_table(served: ServeRecord) -> Table:
    """Return the table of speeds, with a row for each arm, load and R."""
    has_tails = any("p99" in it.ttft_ms for it in served.results)  # older records lack them
    rows = [
        (
            *_point(runs), str(len(runs)), f"{sum(it.requests for it in runs):,}",
            _cell(runs, p50_ms), _cell(runs, p95_ms), *[_cell(runs, lambda it: it.ttft_ms.get("p99"))] * has_tails,
            _cell(runs, lambda it: it.tpot_ms["p50"]), *[_cell(runs, lambda it: it.tpot_ms.get("p99"))] * has_tails,
            _cell(runs, tokens_per_s), _cell(runs, requests_per_s), _cell(runs, goodput_per_s),
        )
        for runs in _rows(served)
    ]  # fmt: skip
    times = ("p95, ms", *(("p99, ms", "ITL p50, ms", "ITL p99, ms") if has_tails else ("TPOT, ms",)))
    limits = {it.ttft_limit_s for it in served.results} - {None}
    goodput = "".join(f" Goodput: requests a second whose first token came within {limit:g} s." for limit in limits)
    return Table(
        title="Speed",
        columns=(
            "arm", "load", "R", "runs", "n", "TTFT p50, ms", *times, "tokens/s", "requests/s", "goodput",
        ),
        rows=rows,
        numeric=6 + len(times),
        note="n: requests of all runs that ended well. Medians of the runs, with the smallest and the largest. R is "
        "the KV that the engine computes in a second over what the drive moves in one. Tokens are output tokens. Rates "
        "are of requests that ended well, over the time until the last request ended."
        + (" ITL: time between output tokens, the mean of each request (TPOT)." if has_tails else "")
        + goodput,
    )  # fmt: skip


def work_table(served: ServeRecord) -> Table:
    """Return the table of the work behind the figures of `arms_table`, with the same rows."""
    rows = [
        (
            *_point(runs), _cell(runs, lambda it: hit_share(it.tokens_by_place), share_text), _session_hits(runs),
            _cell(runs, lambda it: it.loaded_bytes, bytes_text), _cell(runs, lambda it: it.read_bytes, bytes_text),
            _cell(runs, lambda it: it.written_bytes, bytes_text), _cell(runs, lambda it: it.cpu_s),
            _cell(runs, lambda it: it.regret_ms["mean"], lambda value: f"{value:,.1f}"),
        )
        for runs in _rows(served)
    ]  # fmt: skip
    return Table(
        title="Work",
        columns=(
            "arm", "load", "R", "not computed", "by session", "loaded", "read", "written", "CPU, s", "regret, ms",
        ),
        rows=rows,
        numeric=7,
        note="Not computed: of the prompt tokens; by session: the least, the median and the largest share of the "
        "conversations with two or more requests, over all runs. Loaded: KV, by kvtier's log. Read and written: "
        "storage, by the server's processes. Regret: mean of a request that was offered KV.",
    )  # fmt: skip


def _rows(served: ServeRecord) -> list[list[ArmResult]]:
    """Return the repetitions of each arm, load and R, in the order of load, R and arm."""
    found = repetitions(served.results)
    return [runs for _, runs in sorted(found.items(), key=lambda it: (it[0][1], served.names.index(it[0][0])))]


def _point(runs: list[ArmResult]) -> tuple[str, str, str]:
    first = runs[0]
    return first.name, load_text(first.load), f"{first.tier_ratio:g}" if first.tier_ratio else "no limit"


def _cell(runs: list[ArmResult], figure: Figure, show: Callable[[float], str] = digits) -> str:
    found = spread(runs, figure)
    return NONE if found is None else found.text(show)


def _session_hits(runs: Sequence[ArmResult]) -> str:
    """Return the smallest, median and largest share of a conversation's prompt tokens that was not computed."""
    found = [it.hits_by_session for it in runs if it.hits_by_session and it.hits_by_session["sessions"]]
    ends = [(each["min"] or 0.0, each["median"] or 0.0, each["max"] or 0.0) for each in found]
    if not ends:
        return NONE
    least, middle, most = zip(*ends, strict=True)
    return " / ".join(map(share_text, (min(least), median(middle), max(most))))


def cost_table(served: ServeRecord) -> Table:
    """Return the table of cost and energy of tokens, at the stated prices and the load and R of the answer."""

    def cell(name: str, field: str) -> str:
        return _cell(served.runs_at(name, served.top), lambda it: unit_cost(it, served.prices)[field])

    rows = [(name, *(cell(name, field) for field in COSTS)) for name in served.names]
    hour, kwh = served.prices.machine_hour, served.prices.kwh
    machine = "none stated for the machine" if hour is None else f"{hour:g} for an hour of the machine"
    energy = "energy included in it" if kwh is None else f"{kwh:g} for a kWh"
    sources = joined(sorted({it.energy_source for it in served.results}))
    return Table(
        title="Cost and energy of a million tokens",
        columns=("arm", *COSTS.values()),
        rows=rows,
        numeric=4,
        note=f"Prices: {machine}, {energy}. Energy: {sources}. All tokens are those of prompts and answers.",
    )


def runs_table(served: ServeRecord) -> Table:
    """Return the table of all runs."""
    rows = [
        (
            it.name, load_text(it.load), f"{it.tier_ratio:g}" if it.tier_ratio else "no limit", str(it.repetition + 1),
            it.status, f"{it.requests:,}", f"{it.failed:,}", ms_text(it.ttft_ms["p50"]), ms_text(it.ttft_ms["p95"]),
            *(NONE if value is None else digits(value) for value in (it.output_tokens_per_s, it.cpu_s)),
            *(NONE if value is None else bytes_text(value) for value in (it.rss_bytes, it.memory_bytes)),
            f"{it.wrong_sums + it.unmatched:,}",
        )
        for it in sorted(served.results, key=lambda it: (it.point, it.repetition, it.name))
    ]  # fmt: skip
    return Table(
        title="All runs",
        columns=(
            "arm", "load", "R", "repetition", "status", "requests", "failed", "TTFT p50", "p95", "tokens/s", "CPU s",
            "RSS", "memory", "not joined",
        ),
        rows=rows,
        numeric=9,
        note="Memory: the control group's largest, page cache included. Not joined: requests whose logs contradict "
        "each other, or are missing.",
    )  # fmt: skip


def run_name(run: ArmResult) -> str:
    """Return a label for a run."""
    parts = [f"repetition {run.repetition + 1}", *([load_text(run.load)] if run.load else [])]
    return f"{run.name} ({', '.join(parts + ([f'R = {run.tier_ratio:g}'] if run.tier_ratio else []))})"


def answer_charts(served: ServeRecord) -> Charts:
    """Draw TTFT, goodput (if recorded) and output tokens for each arm.

    They are drawn against R, the speed of computing KV over the drive's speed, if the drive was throttled. Otherwise
    they are drawn against the load if there are several, or else as one bar for each arm.
    """
    limited = [ratio for ratio in served.ratios if ratio]
    loads = {load for load, _ in served.points}
    make = _against_ratio if limited else _against_load if len(loads) > 1 else _of_arms
    headings = {
        "ttft": ("Time to first token", p50_ms),
        "ttft-p95": ("p95 of the time to first token", p95_ms),
        "goodput": ("Goodput", goodput_per_s),
        "tokens": ("Output tokens", tokens_per_s),
    }
    if all(it.goodput_per_s is None for it in served.results):  # older records
        del headings["goodput"]
    return {name: make(served, *it) for name, it in headings.items()}


def place_charts(served: ServeRecord) -> Charts:
    """Draw where prompt tokens came from, in total and by turn.

    If both R and the load were varied, also draw TTFT and output tokens against the load.
    """
    charts = {"places": _places(served)}
    if any(served.ratios) and len({load for load, _ in served.points}) > 1:
        charts["ttft-load"] = _against_load(served, "Time to first token", p50_ms)
        charts["tokens-load"] = _against_load(served, "Output tokens", tokens_per_s)
    if any(len(it.by_turn) > 1 for it in served.results):
        hits = Axis(label="prompt tokens not computed", least=0, most=1, text=share_text)
        charts["turns"] = _by_turn(served, "Hits by turn", hits, lambda row: hit_share(row["tokens_by_place"]))
        charts["turns-ttft"] = _by_turn(
            served, "Time to first token by turn", _axis(p50_ms), lambda row: row["ttft_ms"]["p50"]
        )
    return charts


def series_charts(served: ServeRecord) -> Charts:
    """Draw the recorded figures of the runs over time."""
    hues = _hues(served.names, _HUES)
    charts: dict[str, Chart] = {}
    for name, heading, columns, unit in SERIES:
        is_bytes = unit == "bytes a second"
        curves = [
            # An unknown value leaves a gap, because a zero would be wrong.
            Curve(
                x=np.array(run.series["at_s"], dtype=float),
                y=np.array(run.series[column], dtype=float) * (1e9 if is_bytes else 1.0),
                colour=hues[run.name],
                dash="-" if number == 0 else DASHED,
                width=1.4,
                label=f"{served.label(run.name)} {label}".strip(),
            )
            for run in served.results
            for number, (column, label) in enumerate(columns)
            if column in run.series
        ]
        if curves:
            x, y = Axis(label="seconds", least=0), Axis(label=unit, least=0, text=decimal if is_bytes else None)
            charts[name] = Chart(
                heading=heading, marks=curves, x=x, y=y, caption="Seconds since the measured part began."
            )
    return charts


def _against_ratio(served: ServeRecord, what: str, of: Figure) -> Chart:
    load, ratios = served.top[0], [ratio for ratio in served.ratios if ratio]
    found = {
        name: [(ratio, it) for ratio in ratios if (it := served.at(name, (load, ratio), of))] for name in served.names
    }
    return Chart(
        heading=f"{what} against the drive's speed",
        marks=[*_lines(served, found), Rule(at=1.0, dash=":", is_vertical=True)],
        x=Axis(label="R: computing over the drive", is_log=True, ticks=few(ratios)),
        y=_axis(of),
        caption="R is the KV that the engine computes in a second over what the drive moves in one: right of 1 the "
        "drive is slower than computing. Medians of the runs; bands: smallest and largest.",
    )


def _against_load(served: ServeRecord, what: str, of: Figure) -> Chart:
    names = list(dict.fromkeys(name for load, _ in served.points for name, _ in load))
    moving = next((name for name in names if len({dict(load).get(name) for load, _ in served.points}) > 1), "")
    own = sorted({it.point for it in served.results if it.name == served.own})
    lowest = {load: min(ratio for other, ratio in own if other == load) for load, _ in own}
    found = {
        name: [(dict(load).get(moving, 0.0), it) for load, ratio in lowest.items()
               if (it := served.at(name, (load, ratio), of))]
        for name in served.names
    }  # fmt: skip
    known = {"requests_per_s": "requests/s asked for", "users": "users"}
    label = known.get(moving, moving.replace("_", " "))
    rates = [it["requests_per_s"] / it["share_of_capacity"] for it in map(dict, lowest) if "share_of_capacity" in it]
    limit = [Rule(at=median(rates), dash=":", is_vertical=True)] if rates else []
    return Chart(
        heading=f"{what} against load",
        marks=[*_lines(served, found), *limit],
        x=Axis(
            label=f"{label.removesuffix(' asked for')} (dotted: limit of computing)" if rates else label,
            ticks=few({at for points in found.values() for at, _ in points}),
            text=digits,
        ),
        y=_axis(of, [value for figure in TIMES for value in _medians(served, figure)] if of in TIMES else ()),
        caption="Medians of the runs; bands: smallest and largest. The drive has no limit, or the highest. Dotted: the "
        "load at which the server without offloading computes all the time.",
    )


def _of_arms(served: ServeRecord, what: str, of: Figure) -> Chart:
    hues = _hues(served.names, _HUES)
    found = {name: it for name in served.names if (it := served.at(name, served.top, of))}
    bars = Bars(
        names=[served.label(name).replace(" (", "\n(") for name in found],
        values=[it.median for it in found.values()],
        colours=[hues[name] for name in found],
        texts=[digits(it.median) for it in found.values()],
        ends=([it.median - it.low for it in found.values()], [it.high - it.median for it in found.values()]),
    )
    x = Axis(label=_axis(of).label, least=0, most=1.18 * max([it.high for it in found.values()], default=1.0))
    return Chart(heading=what, marks=[bars], x=x, caption="Medians of the runs; lines: smallest and largest.")


def _places(served: ServeRecord) -> Chart:
    sums = {name: Counter[str]() for name in served.names}
    for name, found in sums.items():
        for run in served.runs_at(name, served.top):
            found.update(run.tokens_by_place or {})
    known = {served.label(name).replace(" (", "\n("): it for name, it in sums.items() if it.total()}
    places = sorted(
        {place for it in sums.values() for place in it}, key=lambda it: (it == COMPUTED, it != RESIDENT, it)
    )
    hues = _hues(places, _PLACE_HUES)
    parts = [(place, hues[place], [it[place] for it in known.values()]) for place in places]
    return Chart(
        heading="Prompt tokens by place",
        marks=stacked(list(known), parts),
        x=Axis(label="share of the prompt tokens", least=0, most=1, text=share_text),
        caption="Share of the prompt tokens, of all complete runs at the point of the answer.",
    )


def _by_turn(served: ServeRecord, heading: str, y: Axis, of: Callable[[Mapping[str, Any]], float | None]) -> Chart:
    found: dict[str, list[tuple[float, Spread]]] = {}
    for name in served.names:
        rows = [row for run in served.runs_at(name, served.top) for row in run.by_turn]
        turns: dict[int, list[float]] = {}
        for turn, value in ((row["turn"] + 1, of(row)) for row in rows):
            if value is not None:
                turns.setdefault(turn, []).append(value)
        found[name] = [(turn, Spread(median(own), min(own), max(own))) for turn, own in sorted(turns.items())]
    ticks = few({row["turn"] + 1 for run in served.results for row in run.by_turn})
    return Chart(
        heading=heading,
        marks=_lines(served, found),
        x=Axis(label="turn of the conversation", ticks=ticks),
        y=y,
        caption="All complete runs at the point of the answer. The first turn of a conversation has no history to "
        "load.",
    )


def _lines(served: ServeRecord, found: Mapping[str, Sequence[tuple[float, Spread]]]) -> list[Curve]:
    """Return each arm's medians, with a band from the smallest to the largest."""
    hues = _hues(served.names, _HUES)
    return [
        Curve(
            x=[at for at, _ in points],
            y=[it.median for _, it in points],
            colour=hues[name],
            label=served.label(name),
            marker=_LOOKS.get(name, ("o", "-"))[0],
            dash=_LOOKS.get(name, ("o", "-"))[1],
            band=([it.low for _, it in points], [it.high for _, it in points]),
        )
        for name, points in found.items()
        if points
    ]


def _medians(served: ServeRecord, of: Figure) -> list[float]:
    """Return the medians of a figure for all arms at all points."""
    found = (served.at(name, point, of) for name in served.names for point in served.points)
    return [it.median for it in found if it]


def _axis(of: Figure, values: Sequence[float] = ()) -> Axis:
    """Return the axis of a figure, wide enough for `values`. Charts with equal `values` can be compared by eye."""
    ends = min(values, default=0.0), max(values, default=0.0)
    if 0 < LOGARITHMIC_FROM * ends[0] < ends[1]:
        return Axis(label=LABELS[of], is_log=True, least=ends[0] / MARGIN, most=ends[1] * MARGIN)
    return Axis(label=LABELS[of], least=0, most=MARGIN * ends[1] or None)


def _hues(names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the color of each name."""
    spare = iter(_OTHER_HUES)
    return {name: known.get(name) or next(spare, "soft") for name in names}
