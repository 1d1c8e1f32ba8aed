"""What the traffic asks for: lengths, what of it can be reused, and how the answer depends on time.

A prompt begins with the shared system prompt and the conversation so far, so what it can reuse is all of it that an
earlier prompt had, cut down to whole chunks. Two sorts of requests are told apart, since an average of them would be
neither: a conversation's first query, which finds the system prompt at most, and the later ones.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.plan.inputs import Inputs
from kvtier.plan.reuse import ReuseCurve, lognormal_curve
from kvtier.plan.trace import TraceSummary, read_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One request, on average, and how requests follow one another."""

    interval_s: float
    """Between two queries of a user. A trace with its own pauses has no users: then this is 1, and a "user" is a query
    a second."""
    requests_per_s: float
    """What the inputs ask for."""
    has_users: bool
    first_share: float
    """Share of requests that are the first of a conversation."""
    first_tokens: float
    """Prompt of a first request."""
    later_tokens: float
    """Prompt of a later one."""
    prefix_tokens: float
    """Reusable by every request, and asked for so often that GPU memory always holds it."""
    reusable_tokens: float
    """Reusable by a later request, the prefix included."""
    answer_tokens: float
    curve: ReuseCurve
    burst: float | None
    """Busiest moments over the average, where a trace tells."""
    notes: tuple[str, ...]

    @property
    def input_tokens(self) -> float:
        """Prompt of a request, on average."""
        return self.first_share * self.first_tokens + (1 - self.first_share) * self.later_tokens

    @property
    def reuse(self) -> float:
        """Share of all prompt tokens that can be reused."""
        later = (1 - self.first_share) * self.reusable_tokens
        return (self.first_share * self.prefix_tokens + later) / self.input_tokens

    @property
    def session_tokens(self) -> float:
        """What a conversation holds after a later query and its answer."""
        return self.later_tokens + self.answer_tokens


def trace_of(inputs: Inputs) -> TraceSummary | None:
    """What the trace says that the inputs name; None when they name none.

    Raises:
        ConfigError: the trace cannot be read.
    """
    return read_trace(Path(inputs.traffic.trace), inputs.traffic.trace_window_s) if inputs.traffic.trace else None


def demand_of(inputs: Inputs, trace: TraceSummary | None) -> Demand:
    """The demand that the inputs describe, or the trace where there is one.

    Raises:
        ConfigError: the inputs contradict each other.
    """
    return _reusing(inputs, _measured(inputs, trace) if trace else _conversations(inputs))


def _conversations(inputs: Inputs) -> Demand:
    """Conversations of `turns` queries: each prompt is the one before, its answer, and a new question."""
    traffic, chunk = inputs.traffic, inputs.software.chunk_tokens
    begin = traffic.prefix_tokens + traffic.history_tokens + traffic.question_tokens
    step = traffic.question_tokens + traffic.answer_tokens
    prompts = [begin + turn * step for turn in range(traffic.turns)]
    # A later prompt shares with what is stored the prompt before it and that one's answer, in whole chunks.
    stored = [(prompt + traffic.answer_tokens) // chunk * chunk for prompt in prompts[:-1]]
    later = prompts[1:] or prompts
    return _demand(
        inputs,
        requests_per_s=traffic.users / traffic.interval_s,
        first_share=1 / traffic.turns,
        first_tokens=float(prompts[0]),
        later_tokens=sum(later) / len(later),
        prefix_tokens=float(traffic.prefix_tokens // chunk * chunk),
        reusable_tokens=sum(stored) / len(stored) if stored else 0.0,
        answer_tokens=float(traffic.answer_tokens),
    )


def _measured(inputs: Inputs, trace: TraceSummary) -> Demand:
    """Requests as in the trace; where it does not tell what is reused, as the inputs say."""
    if trace.curve is None and inputs.traffic.reuse is None:
        raise ConfigError(f"trace {trace.path} does not tell what is reused; set traffic.reuse (--reuse)")
    rate = inputs.traffic.load * trace.requests / trace.duration_s
    first_share = trace.first_share if trace.curve else 1 / inputs.traffic.turns
    reusable = trace.reusable_tokens / (1 - first_share) if first_share < 1 else 0.0
    return _demand(
        inputs,
        requests_per_s=rate,
        first_share=first_share,
        first_tokens=trace.input_tokens,
        later_tokens=trace.input_tokens,
        prefix_tokens=0.0,
        reusable_tokens=min(reusable, trace.input_tokens),
        answer_tokens=trace.output_tokens,
        trace=trace,
    )


def _demand(
    inputs: Inputs,
    *,
    requests_per_s: float,
    first_share: float,
    first_tokens: float,
    later_tokens: float,
    prefix_tokens: float,
    reusable_tokens: float,
    answer_tokens: float,
    trace: TraceSummary | None = None,
) -> Demand:
    traffic = inputs.traffic
    curve = trace.curve if trace else None
    own_pauses = curve is not None
    return Demand(
        interval_s=1.0 if own_pauses else traffic.interval_s,
        requests_per_s=requests_per_s,
        has_users=not own_pauses,
        first_share=first_share,
        first_tokens=first_tokens,
        later_tokens=later_tokens,
        prefix_tokens=min(prefix_tokens, first_tokens),
        reusable_tokens=reusable_tokens,
        answer_tokens=answer_tokens,
        curve=curve
        or lognormal_curve(
            traffic.interval_s,
            traffic.interval_cv,
            tokens=later_tokens + answer_tokens - prefix_tokens,
            last_share=1 / traffic.turns,
        ),
        burst=trace.burst if trace else None,
        notes=trace.notes if trace else (),
    )


def _reusing(inputs: Inputs, demand: Demand) -> Demand:
    """The demand with the share of reuse that the inputs name, where they name one."""
    share = inputs.traffic.reuse
    if share is None:
        return demand
    if share > 1 - 1 / max(demand.input_tokens, 2):
        origin = inputs.origin("traffic.reuse")
        raise ConfigError(f"traffic.reuse = {share:g} (from {origin}): some token is always new; allowed: less than 1")
    # The later requests reuse; where even all of their prompts are not enough, more requests are later ones.
    first_share = min(demand.first_share, max(1 - share * demand.input_tokens / demand.later_tokens, 0.0))
    later = share * demand.input_tokens / (1 - first_share) if share else 0.0
    return replace(demand, first_share=first_share, prefix_tokens=0.0, reusable_tokens=min(later, demand.later_tokens))
