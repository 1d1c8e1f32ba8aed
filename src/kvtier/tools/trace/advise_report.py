"""Makes the report of `kvtier trace advise`: the change that saves most, all changes, and where they lie."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvtier.report.format import NONE, counted, share_text, short_count
from kvtier.report.table import Table
from kvtier.tools.charts.chart import Axis, Bars, Chart
from kvtier.tools.charts.report import PageSection, Report
from kvtier.tools.trace.advise import QUANTILES, Advice, Cost

FINDING_LEAST = 0.01
"""A change is worth a word if it saves at least this share of the misses."""
_COLUMNS = ("change", "requests", "tokens", "of all tokens", "of all misses")


class _Change(NamedTuple):
    name: str
    text: str
    saved: Cost
    is_certain: bool = True


def advice_report(advice: Advice, notes: Sequence[str]) -> Report:
    """Return the report of a trace's advice. `notes` say how the trace was read."""
    changes = sorted(_changes(advice), key=lambda it: -it.saved.tokens)
    shown = [*changes, _Change("no prefix", "only reuse without a common prefix, at most", advice.bound)]
    shares = [it.saved.share_of_misses for it in shown]
    chart = Chart(
        heading="Misses saved",
        marks=[
            Bars(
                names=[it.name for it in shown],
                values=shares,
                colours=[*["tiered"] * len(changes), "alone"],
                texts=[share_text(it) for it in shares],
            )
        ],
        x=Axis(label="share of all misses", least=0, text="{:.0%}".format),
        caption="Changes overlap where one cause is behind several.",
    )
    rows = [
        (
            text,
            f"{saved.count:,}" if saved.count else NONE,
            short_count(saved.tokens),
            share_text(saved.share_of_tokens),
            share_text(saved.share_of_misses),
        )
        for _, text, saved, _ in shown
    ]
    text = (
        f"An unbounded prefix cache misses {short_count(advice.missed_tokens)} of {short_count(advice.input_tokens)} "
        f"input tokens ({share_text(1 - advice.hit_rate)})."
    )
    savings = Table(title="What each change would save", columns=_COLUMNS, rows=rows, numeric=4, note=chart.caption)
    section = PageSection(
        title=f"{advice.trace}: {advice.requests:,} requests, blocks of {advice.block_tokens} tokens",
        texts=[text],
        charts=lambda: {"savings": chart},
        notes=[*notes, *_limits(advice)],
        tables=[savings, *_details(advice)],
    )
    return Report(command="kvtier trace advise", answer=_answer(advice, changes), sections=[section])


def _changes(advice: Advice) -> Iterator[_Change]:
    cuts, heads, order = advice.early_cuts, advice.heads, advice.order
    if cuts.count:
        text = f"what changes near token {cuts.at_tokens[len(QUANTILES) // 2]:,} to the end"
        yield _Change("early cuts", text, cuts, cuts.is_certain)
    if heads.count:
        yield _Change("heads", f"{counted(heads.heads, 'head')} behind the text that they share", heads)
    if order.moves and order.as_sent is not None and order.best_online is not None:
        gain = order.best_online - order.as_sent
        saved = Cost(
            0, round(gain * advice.input_tokens), gain, gain * advice.input_tokens / max(advice.missed_tokens, 1)
        )
        yield _Change("order of parts", ", ".join(it for it, _ in order.moves), saved)


def _answer(advice: Advice, changes: Sequence[_Change]) -> str:
    for it in changes:
        if it.is_certain and it.saved.share_of_misses >= FINDING_LEAST:
            return f"Moving {it.text} would save up to {share_text(it.saved.share_of_misses)} of all misses."
    if not advice.bound.is_measured:
        return "No change of layout is known to save 1% of the misses."
    rest = share_text(advice.bound.share_of_tokens)
    return (
        f"No change of layout saves 1% of the misses. Reuse without a common prefix saves at most {rest} of the tokens."
    )


def _limits(advice: Advice) -> Iterator[str]:
    """Yield what the trace does not tell."""
    if not advice.bound.is_measured:
        yield (
            "The ids name whole prefixes. They show neither the parts of prompts nor text that repeats behind a cut. "
            "Heads are derived from lengths within a session. The last row is all misses without another reason."
        )
    else:
        share = share_text(advice.bound.repeated_share_of_misses)
        yield f"{share} of the misses repeat an earlier prompt or answer at some place."
    if not advice.early_cuts.is_certain:
        yield "Early cuts are not certain: some requests have no session, so they may be other conversations."
    if advice.bound.is_measured and advice.order.as_sent is None:
        yield "The order of parts is not examined, because nothing tells them; --separator divides texts."


def _details(advice: Advice) -> Iterator[Table]:
    cuts, order = advice.early_cuts, advice.order
    if cuts.count:
        rows = [(f"{share:.0%} of the cuts", f"{at:,}") for share, at in zip(QUANTILES, cuts.at_tokens, strict=True)]
        where = f"In {counted(cuts.sessions, 'session')}." if cuts.sessions else ""
        yield Table(title="Where early cuts lie", columns=("", "at most token"), rows=rows, numeric=1, note=where)
    if cuts.examples:
        rows = [(f"{it.at_tokens:,}", it.before, it.after) for it in cuts.examples]
        yield Table(title="Lines that change", columns=("token", "before", "after"), rows=rows)
    if order.as_sent is not None:
        rows = [("as sent", f"{order.as_sent:.4f}"), *((move, f"{rate:.4f}") for move, rate in order.moves)]
        yield Table(title="Order of parts", columns=("each with those above", "hit rate"), rows=rows, numeric=1)
    rows = [(f"{tokens:,}", f"{rate:.4f}") for tokens, rate in advice.chunks]
    yield Table(title="What chunk size costs", columns=("tokens of a chunk", "hit rate"), rows=rows, numeric=2)
