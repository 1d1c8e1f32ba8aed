"""Builds the report of `kvtier trace advise`: what each change of the prompts would save, and where prompts differ."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier.report.format import NONE, counted, digits, share_text, short_count
from kvtier.report.table import Table
from kvtier.tools.charts.chart import Axis, Bars, Chart
from kvtier.tools.charts.report import PageSection, Report
from kvtier.tools.trace.advise import QUANTILES, Advice, Cost

FINDING_LEAST = 0.01
"""Least share of the misses that a change must save to be named in the report's answer."""


class _Change(NamedTuple):
    name: str
    text: str
    saved: Cost
    is_certain: bool = True


class PlanCost(NamedTuple):
    """What computing a token costs according to a plan."""

    gpu_s_per_token: float
    price_per_gpu_hour: float | None
    """Price of an hour of one GPU; None if the plan has no prices."""
    currency: str

    def of(self, tokens: int) -> dict[str, float | None]:
        """Return the GPU seconds for computing `tokens`, and the cost of these seconds."""
        gpu_s = tokens * self.gpu_s_per_token
        return {"gpu_s": gpu_s, "cost": self.price_per_gpu_hour and gpu_s / 3600 * self.price_per_gpu_hour}


def read_plan(path: Path) -> PlanCost:
    """Read the output of `kvtier plan --json`.

    Raises:
        ConfigError: the file cannot be read, or has other contents.
    """
    with suppress(OSError, ValueError, RecursionError):
        match json.loads(path.read_text(encoding="utf-8")):  # pyright: ignore[reportMatchNotExhaustive]
            case {
                "prefill_gpu_s_per_token": int() | float() as gpu_s,
                "price_per_gpu_hour": int() | float() | None as price,
                "inputs": {"price.currency": {"value": str(currency)}},
            } if gpu_s > 0 and (price or 0) >= 0:
                return PlanCost(gpu_s, price, currency)
    raise ConfigError(
        "is not a plan", setting="--plan", value=repr(str(path)), allowed="the output of `kvtier plan MODEL --json`"
    )


def advice_json(advice: Advice, plan: PlanCost | None) -> dict[str, Any]:
    """Return a trace's advice as plain values. With a plan, they include the saving of each change."""
    return asdict(advice) | (
        {}
        if plan is None
        else {
            "plan": plan._asdict(),
            "savings": [
                {"change": it.name, "tokens": it.saved.tokens, **plan.of(it.saved.tokens)} for it in _shown(advice)
            ],
        }
    )


def advice_report(advice: Advice, notes: Sequence[str], plan: PlanCost | None = None) -> Report:
    """Build the report of a trace's advice.

    Args:
        advice: the advice.
        notes: sentences on how the trace was read.
        plan: cost of computing tokens. None leaves out costs.
    """
    *changes, _ = shown = _shown(advice)
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
            *(NONE if it is None else digits(it) for it in (plan.of(saved.tokens) if plan else {}).values()),
        )
        for _, text, saved, _ in shown
    ]
    columns = (
        "change",
        "requests",
        "tokens",
        "of all tokens",
        "of all misses",
        *(("GPU seconds", "cost") if plan else ()),
    )
    section = PageSection(
        title=f"{advice.trace}: {advice.requests:,} requests, blocks of {advice.block_tokens} tokens",
        texts=[
            (
                f"An unbounded prefix cache misses {short_count(advice.missed_tokens)} of "
                f"{short_count(advice.input_tokens)} input tokens ({share_text(1 - advice.hit_rate)})."
            )
        ],
        charts=lambda: {"savings": chart},
        notes=[*notes, *_limits(advice)],
        tables=[
            Table(
                title="What each change would save",
                columns=columns,
                rows=rows,
                numeric=len(columns) - 1,
                note=f"{chart.caption} {f'Costs are in {plan.currency}.' if plan else ''}".strip(),
            ),
            *_details(advice),
        ],
    )
    return Report(command="kvtier trace advise", answer=_answer(advice, changes), sections=[section])


def _shown(advice: Advice) -> list[_Change]:
    """Return the changes, the largest saving first, and then the misses that none of them can save."""
    changes = sorted(_changes(advice), key=lambda it: -it.saved.tokens)
    return [*changes, _Change("no prefix", "only reuse without a common prefix, at most", advice.bound)]


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
    """Yield sentences on what the trace does not show."""
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
        yield "The order of parts is not examined, because the parts are unknown; --separator divides texts."


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
