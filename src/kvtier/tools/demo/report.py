"""Builds the report of `kvtier demo`."""

from collections.abc import Iterator
from functools import partial
from statistics import median

from kvtier.report.format import NONE, bytes_text, time_text
from kvtier.report.table import Table
from kvtier.tools.charts.chart import Axis, Chart, Charts, Curve, stacked
from kvtier.tools.charts.report import PageSection, Report
from kvtier.tools.demo.request_plan import ANSWER_CHARACTERS, TRACE_NAME, one_line
from kvtier.tools.demo.result import DemoResult, PassResult, is_same

PASSES = {
    "none": "the engine alone: every prompt is computed from its first token",
    "cold": "kvtier with an empty store: conversations reuse their own earlier turns",
    "warm": "kvtier in a new process: reads from disk what the cold pass stored",
}
TIERS = {"host": "host memory", "directory": "disk"}
"""Names of tiers in the report. Other tiers keep their names."""
PASS_COLOURS = {"none": "alone", "cold": "gpu", "warm": "tiered"}
TIER_COLOURS = {"host": "host", "directory": "disk"}
WEIGHTS = {
    "pretrained": "The model is very small: many of its answers are wrong. kvtier must not change any answer.",
    "random": "The weights are random, so the answers mean nothing. Time and KV depend only on the shape of the model.",
}
"""Notes on the answers, by the kind of weights."""
LIMITS = (
    "Requests run one at a time, so no request waits in a queue. The effect of less prefill on queues is not shown.",
    "Without kvtier the engine keeps no KV between requests. kvtier is for KV that exceeds the engine's own memory.",
    "The disk is this machine's own. The operating system may hold some of its blocks in memory.",
)


def demo_report(result: DemoResult) -> Report:
    """Build the report of the demo. Without matplotlib it has no charts."""
    passes = Table(("", ""), [(it.name, PASSES[it.name]) for it in result.passes])
    conditions = Table(("", ""), _conditions(result), title="Conditions")
    return Report(
        command="kvtier demo",
        answer=_headline(result),
        sections=[
            PageSection(
                texts=[_conditions_in_short(result)],
                problems=result.problems,
                charts=partial(_charts, result),
                tables=[*_answers(result), table(result), passes, conditions],
            ),
            PageSection(title="What this does not show", notes=[WEIGHTS[result.weights], *LIMITS], is_page_only=True),
            PageSection(tables=[_requests_table(result)], is_page_only=True),
        ],
    )


def _headline(result: DemoResult) -> str:
    before, after = (time_text(result.find_pass(name).ttft_ms(50) / 1e3) for name in ("none", "warm"))
    same = "BUT THE ANSWERS DIFFER" if result.difference else "the answers are the same, token for token"
    return (
        f"Median time to first token: {before} without kvtier, {after} after a restart with it "
        f"({result.speed_up('warm'):.1f}x); {same}."
    )


def _conditions_in_short(result: DemoResult) -> str:
    prompts = [it.prompt_tokens for it in result.passes[0].samples]
    return (
        f"{len(prompts)} requests of {min(prompts):,} to {max(prompts):,} prompt tokens, one at a time, on "
        f"{result.threads} CPU threads; {result.parameters / 1e6:.1f} M parameters; without kvtier the engine "
        "keeps no KV between requests."
    )


def _answers(result: DemoResult) -> Iterator[Table]:
    """Yield one table of the questions and answers, or nothing if the weights are random.

    The answers of random weights mean nothing.
    """
    if result.weights == "random":
        return
    rows = [
        (
            f"{samples[0].session + 1}.{samples[0].turn + 1}",
            question,
            one_line(samples[0].text, ANSWER_CHARACTERS),
            *(time_text(it.ttft_ms / 1e3) for it in samples),
            "yes" if is_same(samples) else "NO",
        )
        for question, samples in result.by_request()
    ]
    columns = ("turn", "question", "answer without kvtier", *(it.name for it in result.passes), "same")
    note = (
        "A turn is CONVERSATION.TURN; its question is the new part of the prompt, shortened. Times to the first token: "
        "without kvtier (none), with an empty store (cold), after a restart (warm). Same: all passes gave this answer, "
        "token for token."
    )
    yield Table(columns, rows, len(result.passes) + 1, title="Questions and answers", note=note)


def table(result: DemoResult) -> Table:
    """Return the table of figures over all requests, with a column for each pass."""
    passes = result.passes
    tiers = list(dict.fromkeys(tier for it in passes for tier in it.restored_by_tier))
    answers = [[sample.answer for sample in it.samples] for it in passes]
    rows = [
        ("time to first token, median", *(time_text(it.ttft_ms(50) / 1e3) for it in passes)),
        ("time to first token, p95", *(time_text(it.ttft_ms(95) / 1e3) for it in passes)),
        ("speed-up of the median", *(f"{result.speed_up(it.name):.1f}x" for it in passes)),
        ("speed-up of p95", *(f"{result.speed_up(it.name, 95):.1f}x" for it in passes)),
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


def _conditions(result: DemoResult) -> list[tuple[str, str]]:
    facts, cost = result.machine, result.miss_cost
    prefill = f"{result.passes[0].prefill_share:.0%} of the time without kvtier was prefill"
    rows = [
        ("Model", result.model),
        ("Why this model", f"{result.why}; in this run {prefill}"),
        ("Input", TRACE_NAME),
        ("Requests", result.conversations),
        (
            "Prompts",
            "each continues the earlier prompt and this model's own answer to it; "
            + (
                "byte-level BPE of 4,096 tokens"
                if result.seed is not None
                else "the model's own tokenizer and chat template"
            ),
        ),
        ("Answers", f"up to {result.new_tokens} tokens each, greedy"),
        ("Seed", NONE if result.seed is None else f"{result.seed} (weights)"),
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
        ("Elapsed", f"{time_text(result.elapsed_s)}, of it {time_text(result.prepare_s)} before the first pass"),
    ]
    if cost is not None:
        ratio = f"time to first token in the cold pass over that without kvtier: {cost[0]:.2f} (median of {cost[1]})"
        rows.append(("Cost where nothing can be restored", ratio))
    return rows + [("Note", note) for note in result.notes]


def _requests_table(result: DemoResult) -> Table:
    of_passes = (f"{it.name}, {what}" for it in result.passes for what in ("ms", "restored"))
    columns = ["conversation.turn", "prompt tokens", *of_passes]
    rows = [
        (
            f"{samples[0].session + 1}.{samples[0].turn + 1}",
            f"{samples[0].prompt_tokens:,}",
            *(cell for it in samples for cell in (f"{it.ttft_ms:,.1f}", f"{it.restored_tokens:,}")),
        )
        for samples in zip(*(it.samples for it in result.passes), strict=True)
    ]
    return Table(columns, rows, numeric=len(columns) - 1, title="All requests, in sending order")


def _charts(result: DemoResult) -> Charts:
    passes = result.passes
    tiers = list(dict.fromkeys(tier for it in passes for tier in it.restored_by_tier))
    parts = [
        ("computed", "computed", [it.computed_tokens for it in passes]),
        *(
            (TIERS.get(it, it), TIER_COLOURS.get(it, "shared"), [one.restored_by_tier.get(it, 0) for one in passes])
            for it in tiers
        ),
    ]
    return {
        "turns": Chart(
            heading="Time to first token by turn",
            marks=[mark for place, it in enumerate(passes) for mark in _turns(it, place - (len(passes) - 1) / 2)],
            x=Axis(label="turn of the conversation"),
            y=Axis(label="time to first token, ms", least=0),
            caption="A dot is one request; lines join the medians of each turn. A conversation grows with every turn, "
            "and so does the prompt to compute without kvtier.",
        ),
        "sources": Chart(
            heading="Where the prompts' KV came from",
            marks=stacked([it.name for it in passes], parts),
            x=Axis(label="share of the prompt tokens", least=0, most=1),
            caption="A pass reads a chunk from disk once; later requests of the pass find it in host memory.",
        ),
    }


def _turns(it: PassResult, place: float) -> Iterator[Curve]:
    """Yield a dot for each request of a pass, and the line of the medians of each turn.

    `place` moves the dots sideways, so that those of different passes do not hide each other.
    """
    turns: dict[int, list[float]] = {}
    for sample in it.samples:
        turns.setdefault(sample.turn + 1, []).append(sample.ttft_ms)
    colour, medians = PASS_COLOURS[it.name], {turn: median(turns[turn]) for turn in sorted(turns)}
    x, y = [sample.turn + 1 + 0.16 * place for sample in it.samples], [sample.ttft_ms for sample in it.samples]
    yield Curve(x=x, y=y, colour=colour, dash="", marker="o", alpha=0.4)
    yield Curve(x=list(medians), y=list(medians.values()), colour=colour, label=it.name)
