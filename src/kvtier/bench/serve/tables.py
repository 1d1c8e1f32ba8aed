"""The tables, notes and conditions of `kvtier bench serve`."""

from collections.abc import Callable, Iterator

from kvtier.bench.serve.answer import Figure, ServeRecord, answer, joined, load_text, ms_text, p50_ms, tokens_per_s
from kvtier.bench.serve.results import ArmResult, hit_share, repetitions, spread, unit_cost
from kvtier.bench.serve.run_files import as_row
from kvtier.report.format import NONE, bytes_text, digits, share_text
from kvtier.report.table import Table


def conditions(served: ServeRecord) -> list[tuple[str, str]]:
    """The circumstances of the figures, as name and text."""
    found: list[tuple[str, str]] = []
    varied = {name for it in served.results for name in it.load}
    for name, value in served.conditions.items():
        inner = as_row(value)
        if "sizes" in inner:  # what was varied did not run with the preset's value
            inner = inner | {"sizes": {size: it for size, it in as_row(inner["sizes"]).items() if size not in varied}}
        found.append((name.replace("_", " "), _flat(inner or value)))
    found.append(("requests a second", "; ".join(_rates(served))))
    facts = served.machine
    memory = bytes_text(facts["memory_bytes"]) if "memory_bytes" in facts else "?"
    machine = f"{facts.get('processor', '?')}, {facts.get('cores', '?')} cores, {memory} of memory, "
    return [*found, ("machine", machine + f"{facts.get('system', '?')}, {facts.get('file_system', '?')}")]


def _rates(served: ServeRecord) -> Iterator[str]:
    """What was asked for and what each arm ran at, of each load."""
    preset = as_row(as_row(served.conditions.get("workload")).get("sizes")).get("requests_per_s")
    for load in sorted({load for load, _ in served.points}):
        asked = dict(load).get("requests_per_s", preset)
        ran = [
            f"{served.label(name)} {found.text()}"
            for name in served.names
            if (found := spread((it for it in served.results if it.name == name and it.point[0] == load), _rate))
        ]
        yield f"{'as recorded' if asked is None else f'{asked:g} asked for'}, ran at {', '.join(ran) or NONE}"


def _rate(run: ArmResult) -> float | None:
    return run.requests_per_s


def _flat(value: object) -> str:
    """A JSON object as ``name value, name value``; whole objects inside it in the same way."""
    inner = as_row(value)
    return ", ".join(f"{key.replace('_', ' ')} {_flat(it)}" for key, it in inner.items()) if inner else str(value)


def notes(served: ServeRecord) -> Iterator[str]:
    """What limits the figures."""
    for it in served.results:
        if it.status != "ok":
            done = f"{it.requests} of {it.requests + it.failed} requests completed; " if it.failed else ""
            yield f"{run_name(it)} failed: {done}{it.error or 'unknown error'}. Its figures are left out."
        elif not it.requests:
            yield f"{run_name(it)}: no request ended well. It has no figures."
    wrong = sum(it.wrong_sums for it in served.results)
    if wrong:
        yield f"{wrong:,} requests have places that do not add up to their prompt; they are in no sum of places."
    unmatched = sum(it.unmatched for it in served.results)
    if unmatched:
        yield f"{unmatched:,} requests have no line in a server's log; their places and regret are unknown."
    failed = {run_name(it): it.failed for it in served.results if it.failed}
    if failed:
        each = ", ".join(f"{name} {count:,}" for name, count in failed.items())
        yield f"{sum(failed.values()):,} requests failed; they are in no figure but this one: {each}."
    torn = sum(it.skipped_lines for it in served.results)
    if torn:
        yield f"{torn:,} torn lines were left out."


def arms_table(served: ServeRecord) -> Table:
    """Speed: a line for each arm, load and R."""
    rows = [
        (
            *_point(runs), str(len(runs)), f"{sum(it.requests for it in runs):,}",
            _cell(runs, p50_ms), _cell(runs, lambda it: it.ttft_ms["p95"]),
            _cell(runs, lambda it: it.tpot_ms["p50"]), _cell(runs, tokens_per_s),
            _cell(runs, _rate), _cell(runs, lambda it: it.goodput_per_s),
        )
        for runs in _rows(served)
    ]  # fmt: skip
    limits = {it.ttft_limit_s for it in served.results} - {None}
    goodput = "".join(f" Goodput: requests a second whose first token came within {limit:g} s." for limit in limits)
    return Table(
        title=answer(served),
        columns=(
            "arm", "load", "R", "runs", "n", "TTFT p50, ms", "p95, ms", "TPOT, ms", "tokens/s", "requests/s", "goodput",
        ),
        rows=rows,
        numeric=8,
        note="n: requests of all runs that ended well. Medians of the runs, with the smallest and the largest. R is "
        "the KV that the engine computes in a second over what the drive moves in one. Tokens are output tokens. Rates "
        "are of requests that ended well, over the time until the last request ended." + goodput,
    )  # fmt: skip


def work_table(served: ServeRecord) -> Table:
    """What the figures of `arms_table` took: the lines are the same."""
    rows = [
        (
            *_point(runs), _cell(runs, lambda it: hit_share(it.tokens_by_place), share_text),
            _cell(runs, lambda it: it.loaded_bytes, bytes_text), _cell(runs, lambda it: it.read_bytes, bytes_text),
            _cell(runs, lambda it: it.written_bytes, bytes_text), _cell(runs, lambda it: it.cpu_s),
            _cell(runs, lambda it: it.regret_ms["mean"], lambda value: f"{value:,.1f}"),
        )
        for runs in _rows(served)
    ]  # fmt: skip
    return Table(
        title="Work",
        columns=("arm", "load", "R", "not computed", "loaded", "read", "written", "CPU, s", "regret, ms"),
        rows=rows,
        numeric=6,
        note="Not computed: of the prompt tokens. Loaded: KV, by kvtier's log. Read and written: storage, by the "
        "server's processes. Regret: mean of a request that was offered KV.",
    )


def _rows(served: ServeRecord) -> list[list[ArmResult]]:
    """Repetitions, by load and R, arms in the order of the record."""
    found = repetitions(served.results)
    return [runs for _, runs in sorted(found.items(), key=lambda it: (it[0][1], served.names.index(it[0][0])))]


def _point(runs: list[ArmResult]) -> tuple[str, str, str]:
    first = runs[0]
    return first.name, load_text(first.load), f"{first.tier_ratio:g}" if first.tier_ratio else "no limit"


def _cell(runs: list[ArmResult], figure: Figure, show: Callable[[float], str] = digits) -> str:
    found = spread(runs, figure)
    return NONE if found is None else found.text(show)


def cost_table(served: ServeRecord) -> Table:
    """Cost and energy of a million tokens at the stated prices, at the point of the answer."""
    rows: list[tuple[str, ...]] = []
    for name in served.names:

        def cell(figure: Figure, name: str = name) -> str:
            found = served.at(name, served.top, figure)
            return NONE if found is None else found.text()

        def priced(attribute: str, cell: Callable[[Figure], str] = cell) -> str:
            return cell(lambda it: getattr(unit_cost(it, served.prices), attribute))

        rows.append(
            (
                name, priced("per_million_output_tokens"), priced("per_million_tokens"),
                priced("kwh_per_million_output_tokens"), priced("joules_per_output_token"),
            )
        )  # fmt: skip
    hour, kwh = served.prices.machine_hour, served.prices.kwh
    prices = "Prices: " + ", ".join(
        [
            "none stated for the machine" if hour is None else f"{hour:g} for an hour of the machine",
            "energy included in it" if kwh is None else f"{kwh:g} for a kWh",
        ]
    )
    sources = joined(sorted({it.energy_source for it in served.results}))
    return Table(
        title="Cost and energy of a million tokens",
        columns=("arm", "cost, output tokens", "cost, all tokens", "kWh, output tokens", "J per output token"),
        rows=rows,
        numeric=4,
        note=f"{prices}. Energy: {sources}. All tokens are those of prompts and answers.",
    )


def runs_table(served: ServeRecord) -> Table:
    """Every run."""
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
    """A run in words."""
    parts = [f"repetition {run.repetition + 1}", *([load_text(run.load)] if run.load else [])]
    return f"{run.name} ({', '.join(parts + ([f'R = {run.tier_ratio:g}'] if run.tier_ratio else []))})"
