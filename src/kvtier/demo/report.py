"""The demo's table, charts and HTML report."""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kvtier.demo.result import DemoResult
from kvtier.demo.trace import TRACE_NAME
from kvtier.errors import install_hint
from kvtier.report.chart import Chart, Charts, Colours, figures_html
from kvtier.report.format import NONE, bytes_text, time_text
from kvtier.report.output import has_matplotlib, write_file
from kvtier.report.page import (
    definitions_html,
    list_html,
    page_html,
    paragraphs_html,
    section_html,
    table_html,
    tiles_html,
)
from kvtier.report.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PASSES = {
    "none": "the engine alone: every prompt is computed from its first token",
    "cold": "kvtier with an empty store: conversations reuse their own earlier turns",
    "warm": "kvtier in a new process: reads from disk what the cold pass stored",
    "reopened": "kvtier in a new process: reads from disk what an earlier call stored",
}
TIERS = {"host": "host memory", "directory": "disk"}
"""Names of tiers for readers; others are shown as they are."""
PASS_COLOURS = {"none": "alone", "cold": "gpu", "warm": "tiered", "reopened": "shared"}
TIER_COLOURS = {"host": "host", "directory": "disk"}
LIMITS = (
    "Requests run one at a time, so no request waits in a queue. The effect of less prefill on queues is not shown.",
    "Without kvtier the engine keeps no KV between requests. kvtier is for KV that exceeds the engine's own memory.",
    "The weights are random, so the answers mean nothing. Time and KV depend only on the shape of the model.",
    "The disk is this machine's own. The operating system may hold some of its blocks in memory.",
)


def write_report(path: Path, result: DemoResult) -> None:
    """Write the HTML report.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_file("--report", path, render_report(result))


def render_report(result: DemoResult, made: datetime | None = None) -> str:
    """The HTML of the report; without matplotlib it has no charts."""
    warm, speed_up = result.find_pass("warm"), result.speed_up
    before, after = (time_text(it.ttft_ms(95) / 1e3) for it in (result.find_pass("none"), warm))
    tiles = [
        (f"{speed_up('warm'):.1f}x", "faster to the first token after a restart, median"),
        (f"{before} → {after}", f"time to first token, p95 ({speed_up('warm', 95):.1f}x)"),
        (f"{warm.hit_rate:.1%}", f"of {warm.input_tokens:,} prompt tokens restored, not computed"),
        ("different" if result.difference else "identical", f"answers in all {len(result.passes)} passes"),
    ]
    return page_html(
        "kvtier demo",
        headline(result),
        paragraphs_html([conditions_in_short(result)]),
        paragraphs_html(result.problems, "bad"),
        tiles_html(tiles),
        figures_html(CHARTS, result)
        if has_matplotlib()
        else paragraphs_html([f"Charts need matplotlib: {install_hint('plots')}"]),
        table_html(table(result)),
        definitions_html((it.name, PASSES[it.name]) for it in result.passes),
        section_html("Conditions", definitions_html(conditions(result))),
        section_html("What this does not show", list_html(LIMITS)),
        f"<details><summary>All requests, in sending order</summary>{table_html(_requests_table(result))}</details>",
        made=made,
    )


def headline(result: DemoResult) -> str:
    """The outcome in one sentence."""
    before, after = (time_text(result.find_pass(name).ttft_ms(50) / 1e3) for name in ("none", "warm"))
    same = "BUT THE ANSWERS DIFFER" if result.difference else "the answers are the same, token for token"
    return (
        f"Median time to first token: {before} without kvtier, {after} after a restart with it "
        f"({result.speed_up('warm'):.1f}x); {same}."
    )


def conditions_in_short(result: DemoResult) -> str:
    """The conditions of the headline's figures, in one sentence."""
    prompts = [it.prompt_tokens for it in result.passes[0].samples]
    return (
        f"{len(prompts)} requests of {min(prompts):,} to {max(prompts):,} prompt tokens, one at a time, on "
        f"{result.threads} CPU threads; {result.parameters / 1e6:.1f} M parameters; without kvtier the engine "
        "keeps no KV between requests."
    )


def table(result: DemoResult) -> Table:
    """The sums, a column for each pass."""
    passes = result.passes
    tiers = list(dict.fromkeys(tier for it in passes for tier in it.restored_by_tier))
    answers = [[sample.answer for sample in it.samples] for it in passes]
    rows = [
        ("time to first token, median", *(time_text(it.ttft_ms(50) / 1e3) for it in passes)),
        ("time to first token, p95", *(time_text(it.ttft_ms(95) / 1e3) for it in passes)),
        ("speed-up of the median", *(f"{result.speed_up(it.name):.1f}x" for it in passes)),
        ("prompt tokens", *(f"{it.input_tokens:,}" for it in passes)),
        ("tokens computed", *(f"{it.computed_tokens:,}" for it in passes)),
        *(
            (f"tokens from {TIERS.get(tier, tier)}", *(f"{it.restored_by_tier.get(tier, 0):,}" for it in passes))
            for tier in tiers
        ),
        ("hit rate, of tokens", *(f"{it.hit_rate:.1%}" for it in passes)),
        (
            "restored of restorable tokens",
            *(f"{it.restored_share:.1%}" if it.restorable_tokens else NONE for it in passes),
        ),
        ("bytes on disk", *(bytes_text(it.disk_bytes) for it in passes)),
        ("whole pass", *(time_text(it.wall_s) for it in passes)),
        ("same tokens as the first pass", NONE, *("yes" if it == answers[0] else "NO" for it in answers[1:])),
    ]
    note = (
        "Restorable tokens are counted without kvtier, from tokens alone: whole chunks whose prefix an earlier request "
        "had stored, less the token that must be computed. A whole pass ends when all stores are on disk."
    )
    return Table(("", *(it.name for it in passes)), rows, len(passes), title="The passes in numbers", note=note)


def conditions(result: DemoResult) -> list[tuple[str, str]]:
    """Name and value of everything that the figures depend on."""
    facts, cost = result.machine, result.miss_cost
    prefill = f"{result.passes[0].prefill_share:.0%} of the time without kvtier was prefill"
    rows = [
        ("Model", result.model),
        ("Why this model", f"{result.why}; in this run {prefill}"),
        ("Input", TRACE_NAME),
        ("Requests", result.conversations),
        (
            "Prompts",
            "each continues the earlier prompt and this model's own answer to it; byte-level BPE of 4,096 tokens",
        ),
        ("Answers", f"{result.new_tokens} tokens each, greedy"),
        ("Seed", f"{result.seed} (weights)"),
        ("KV", f"{result.kv_bytes_per_token:,} bytes a token, chunks of {result.chunk_tokens} tokens, float32"),
        (
            "Machine",
            f"{facts['processor']}, {facts['cores']} cores, {bytes_text(int(str(facts['memory_bytes'])))} memory",
        ),
        ("Threads", f"{result.threads} of torch in every pass; passes run one after another, each in its own process"),
        (
            "Load average",
            ", ".join(f"{it.load:.1f} before {it.name}" for it in result.passes)
            + "; above 1 before the first pass means that other processes were running",
        ),
        ("File system", f"{facts.get('file_system', 'unknown')}, {result.directory or 'in a temporary directory'}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in result.software.items())),
        (
            "Rounding",
            f"closest greedy choice {result.margin:.1e} logits; largest change between passes {result.rounding:.1e}",
        ),
        ("Elapsed", f"{time_text(result.elapsed_s)}, of it {time_text(result.tokenizer_s)} to train the tokenizer"),
    ]
    if cost is not None:
        ratio = f"time to first token in the cold pass over that without kvtier: {cost[0]:.2f} (median of {cost[1]})"
        rows.append(("Cost where nothing can be restored", ratio))
    return rows + [("Note", note) for note in result.notes]


def _requests_table(result: DemoResult) -> Table:
    columns = [f"{it.name}, {what}" for it in result.passes for what in ("ms", "restored")]
    rows = [
        (
            f"{samples[0].session + 1}.{samples[0].turn + 1}",
            f"{samples[0].prompt_tokens:,}",
            *(cell for it in samples for cell in (f"{it.ttft_ms:,.1f}", f"{it.restored_tokens:,}")),
        )
        for samples in zip(*(it.samples for it in result.passes), strict=True)
    ]
    return Table(("conversation.turn", "prompt tokens", *columns), rows, numeric=1 + len(columns))


def _draw_turns(axes: "Axes", result: DemoResult, colours: Colours) -> None:
    for place, it in enumerate(result.passes):
        colour = colours[PASS_COLOURS[it.name]]
        # Passes are drawn beside each other within a turn, so that no dot hides another.
        offset = 1 + (place - (len(result.passes) - 1) / 2) * 0.16
        axes.plot(
            [sample.turn + offset for sample in it.samples],
            [sample.ttft_ms for sample in it.samples],
            "o",
            color=colour,
            markersize=3,
            alpha=0.4,
        )
        turns: dict[int, list[float]] = {}
        for sample in it.samples:
            turns.setdefault(sample.turn, []).append(sample.ttft_ms)
        medians = sorted((turn + 1, median(values)) for turn, values in turns.items())
        axes.plot(*zip(*medians, strict=True), color=colour, label=it.name)
    axes.set(xlabel="turn of the conversation", ylabel="time to first token, ms", ylim=(0, None))
    axes.legend(loc="upper left")


def _draw_requests(axes: "Axes", result: DemoResult, colours: Colours) -> None:
    samples = result.passes[0].samples
    order = sorted(range(len(samples)), key=lambda place: (samples[place].session, place))
    highest_ms = max(sample.ttft_ms for it in result.passes for sample in it.samples)
    bases = [-1.1 * highest_ms * row for row in range(len(result.passes))]
    for it, base in zip(result.passes, bases, strict=True):
        tops = [base + it.samples[place].ttft_ms for place in order]
        axes.vlines(range(len(order)), base, tops, colors=colours[PASS_COLOURS[it.name]], linewidth=2)
    axes.set_yticks(bases, [it.name for it in result.passes])
    axes.set(xlabel=f"requests, by conversation; the highest bar is {time_text(highest_ms / 1e3)}")


def _draw_sources(axes: "Axes", result: DemoResult, colours: Colours) -> None:
    names = [it.name for it in result.passes]
    tiers = list(dict.fromkeys(tier for it in result.passes for tier in it.restored_by_tier))
    shares: Mapping[str, list[int]] = {
        "computed": [it.computed_tokens for it in result.passes],
        **{tier: [it.restored_by_tier.get(tier, 0) for it in result.passes] for tier in tiers},
    }
    begins = [0] * len(names)
    for source, tokens in shares.items():
        colour = colours["computed" if source == "computed" else TIER_COLOURS.get(source, "shared")]
        axes.barh(names, tokens, left=begins, color=colour, label=TIERS.get(source, source))
        begins = [begin + count for begin, count in zip(begins, tokens, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="prompt tokens")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2, handlelength=1.2)


CHARTS: Charts[DemoResult] = {
    "turns": Chart(
        "Time to first token by turn",
        _draw_turns,
        "A dot is one request; lines join the medians of each turn. A conversation grows with every turn, and so does "
        "the prompt to compute without kvtier.",
    ),
    "requests": Chart("Every request", _draw_requests, "Time to first token, one bar a request, one scale for all."),
    "sources": Chart(
        "Where the prompts' KV came from",
        _draw_sources,
        "A pass reads a chunk from disk once; later requests of the pass find it in host memory.",
    ),
}
