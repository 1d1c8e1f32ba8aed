"""The results of the demo: every request of every pass, and the sums for the table, the JSON and the report."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

import numpy as np

RESTORED_SHARE_MIN = 0.9
"""Least share of the restorable tokens that the warm pass must restore."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request of one pass."""

    session: int
    turn: int
    prompt_tokens: int
    answer: tuple[int, ...]
    text: str
    """The answer as the model wrote it, possibly with control characters."""
    ttft_ms: float
    """Time from the call of `generate` to the first new token."""
    total_ms: float
    """Time from the call of `generate` to its return."""
    restored: Mapping[str, int]
    """Leading prompt tokens whose KV was loaded, by tier."""
    restorable_tokens: int
    """Restorable tokens, as `StoredPrefixes` counts them; 0 in the pass without kvtier."""
    margins: tuple[float, ...]
    """The best token's logit minus the second best's, for each new token."""

    @property
    def restored_tokens(self) -> int:
        """Tokens restored from all tiers."""
        return sum(self.restored.values())


@dataclass(frozen=True, slots=True)
class PassResult:
    """The results of all requests, sent once through one process."""

    name: str
    samples: tuple[RequestResult, ...]
    set_up_s: float
    """Time to build the model, warm up with one request, and attach kvtier."""
    wall_s: float
    """Time from the first request until the last answer has arrived and all stores have reached the disk."""
    flush_s: float
    """The part of `wall_s` after the last answer."""
    lost: int = 0
    """Objects that did not reach the disk in time."""
    disk_bytes: int = 0
    """Bytes of the store's files after this pass."""
    written_bytes: int = 0
    """Growth of `disk_bytes` in this pass."""
    load: float = 0.0
    """The machine's load average over the minute before the pass. The minute may include earlier passes."""

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(it.prompt_tokens for it in self.samples)

    @property
    def restored_tokens(self) -> int:
        """Prompt tokens whose KV was loaded."""
        return sum(it.restored_tokens for it in self.samples)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.input_tokens - self.restored_tokens

    @property
    def restorable_tokens(self) -> int:
        """Prompt tokens that a perfect cache would have restored."""
        return sum(it.restorable_tokens for it in self.samples)

    @property
    def restored_by_tier(self) -> dict[str, int]:
        """Restored tokens by tier."""
        total: Counter[str] = Counter()
        for sample in self.samples:
            total.update(sample.restored)
        return dict(total)

    @property
    def hit_rate(self) -> float:
        """Restored tokens divided by input tokens."""
        return self.restored_tokens / self.input_tokens

    @property
    def restored_share(self) -> float:
        """Restored tokens divided by restorable tokens; 1 if nothing was restorable."""
        return self.restored_tokens / self.restorable_tokens if self.restorable_tokens else 1.0

    @property
    def prefill_share(self) -> float:
        """Time to first token as a share of total time, summed over all requests."""
        return sum(it.ttft_ms for it in self.samples) / sum(it.total_ms for it in self.samples)

    def ttft_ms(self, percent: float) -> float:
        """Return a percentile of the time to first token, interpolated between samples."""
        return float(np.percentile([it.ttft_ms for it in self.samples], percent))

    def as_dict(self) -> dict[str, object]:
        """Return the figures of the pass, as in the JSON output."""
        return {
            "name": self.name,
            "requests": len(self.samples),
            "input_tokens": self.input_tokens,
            "restored_tokens": self.restored_tokens,
            "restorable_tokens": self.restorable_tokens,
            "computed_tokens": self.computed_tokens,
            "restored_by_tier": self.restored_by_tier,
            "hit_rate": round(self.hit_rate, 4),
            "ttft_ms": {"p50": round(self.ttft_ms(50), 2), "p95": round(self.ttft_ms(95), 2)},
            "wall_s": round(self.wall_s, 3),
            "set_up_s": round(self.set_up_s, 3),
            "flush_s": round(self.flush_s, 3),
            "lost": self.lost,
            "disk_bytes": self.disk_bytes,
            "written_bytes": self.written_bytes,
            "load": round(self.load, 2),
        }


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """The first token at which two passes answered differently."""

    passes: tuple[str, str]
    session: int
    turn: int
    token: int
    margin: float
    """Margin of that token in the first pass. A margin near float32's rounding error means a tie, not wrong KV."""

    def __str__(self) -> str:
        one, other = self.passes
        return (
            f"the answers of passes {one} and {other} in turn {self.turn + 1} of conversation {self.session + 1} "
            f"differ from token {self.token} on (where the logits of the best two tokens were {self.margin:.1e} apart)"
        )


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All passes and the conditions of a demo."""

    model: str
    """Description of the model in one line."""
    why: str
    """Why this model was chosen."""
    weights: str
    """``pretrained`` or ``random``."""
    conversations: str
    """Description of the replayed requests in one line."""
    questions: tuple[str, ...]
    """For each request, the informative part of the user's message in one line."""
    shape: Mapping[str, int]
    parameters: int
    kv_bytes_per_token: int
    seed: int | None
    """Seed of random weights."""
    threads: int
    chunk_tokens: int
    new_tokens: int
    passes: tuple[PassResult, ...]
    elapsed_s: float
    """Time from the start of the command to the end of the last pass."""
    prepare_s: float
    """The part of `elapsed_s` before the first pass."""
    directory: str | None
    """Directory of the store; None if it was temporary."""
    machine: Mapping[str, object]
    software: Mapping[str, str]
    cache_settings: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """Value and origin of kvtier's settings, by name."""
    notes: tuple[str, ...] = ()

    def find_pass(self, name: str) -> PassResult:
        """Return the pass `name`."""
        return next(it for it in self.passes if it.name == name)

    @property
    def difference(self) -> AnswerDifference | None:
        """The first difference between the answers of the first pass and those of another pass, or None."""
        first, *others = self.passes
        return next((it for other in others if (it := find_difference(first, other)) is not None), None)

    @property
    def problems(self) -> list[str]:
        """The reasons for a failure of the demo: different answers, or too few restored tokens."""
        found = [] if self.difference is None else [f"not identical: {self.difference}"]
        warm = self.find_pass("warm")
        if warm.restored_share < RESTORED_SHARE_MIN:
            found.append(
                f"the warm pass restored {warm.restored_tokens:,} of {warm.restorable_tokens:,} restorable tokens "
                f"({warm.restored_share:.1%}); at least {RESTORED_SHARE_MIN:.0%} were expected"
            )
        return found

    @property
    def margin(self) -> float:
        """The smallest margin of all passes, in logits."""
        return min(margin for it in self.passes for sample in it.samples for margin in sample.margins)

    @property
    def rounding(self) -> float:
        """The largest change of a margin from the first pass to another pass, over requests with equal answers."""
        first, *others = self.passes
        changes = (
            abs(before - after)
            for other in others
            for reference, sample in zip(first.samples, other.samples, strict=True)
            if reference.answer == sample.answer
            for before, after in zip(reference.margins, sample.margins, strict=True)
        )
        return max(changes, default=0.0)

    @property
    def miss_cost(self) -> tuple[float, int] | None:
        """The cost of kvtier for requests that it cannot accelerate.

        Returns:
            The median ratio of the cold pass's TTFT to the TTFT without kvtier, and the number of requests. Only
            requests for which the cold pass restored nothing count. None if there are no such requests.
        """
        pairs = zip(self.find_pass("none").samples, self.find_pass("cold").samples, strict=True)
        ratios = [cold.ttft_ms / none.ttft_ms for none, cold in pairs if not cold.restored_tokens]
        return (median(ratios), len(ratios)) if ratios else None

    def by_request(self) -> Iterator[tuple[str, tuple[RequestResult, ...]]]:
        """Yield each request's question, and its results in the order of the passes."""
        return zip(self.questions, zip(*(it.samples for it in self.passes), strict=True), strict=True)

    def speed_up(self, name: str, percent: float = 50) -> float:
        """Return the TTFT without kvtier divided by the TTFT of the pass `name`, at a percentile."""
        return self.find_pass("none").ttft_ms(percent) / self.find_pass(name).ttft_ms(percent)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON output, without samples."""
        cost, difference = self.miss_cost, self.difference
        return {
            "model": self.model,
            "weights": self.weights,
            "identical": difference is None,
            "passes": [it.as_dict() for it in self.passes],
            "answers": [
                {
                    "session": samples[0].session,
                    "turn": samples[0].turn,
                    "question": question,
                    "answer": samples[0].text,
                    "identical": is_same(samples),
                    "ttft_ms": {
                        it.name: round(sample.ttft_ms, 3) for it, sample in zip(self.passes, samples, strict=True)
                    },
                }
                for question, samples in self.by_request()
            ],
            "model_details": {
                **self.shape,
                "parameters": self.parameters,
                "kv_bytes_per_token": self.kv_bytes_per_token,
                "dtype": "float32",
                "why": self.why,
            },
            "conversations": self.conversations,
            "chunk_tokens": self.chunk_tokens,
            "new_tokens": self.new_tokens,
            "seed": self.seed,
            "threads": self.threads,
            "speed_up_ttft_p50": {it.name: round(self.speed_up(it.name), 2) for it in self.passes if it.name != "none"},
            "miss_cost": None if cost is None else {"ttft_ratio_p50": round(cost[0], 3), "requests": cost[1]},
            "prefill_share": round(self.find_pass("none").prefill_share, 3),
            "closest_choice": self.margin,
            "rounding": self.rounding,
            "difference": None if difference is None else asdict(difference),
            "elapsed_s": round(self.elapsed_s, 2),
            "directory": self.directory,
            "notes": list(self.notes),
        }

    def samples_as_dicts(self) -> list[dict[str, object]]:
        """Return every request of every pass, for the record."""
        return [
            {
                "pass": it.name,
                "session": sample.session,
                "turn": sample.turn,
                "prompt_tokens": sample.prompt_tokens,
                "restored": dict(sample.restored),
                "restorable_tokens": sample.restorable_tokens,
                "ttft_ms": round(sample.ttft_ms, 3),
                "total_ms": round(sample.total_ms, 3),
                "margin": min(sample.margins),
            }
            for it in self.passes
            for sample in it.samples
        ]


def is_same(samples: Sequence[RequestResult]) -> bool:
    """Return whether one request has the same answer, token for token, in all passes."""
    return len({it.answer for it in samples}) == 1


def find_difference(one: PassResult, other: PassResult) -> AnswerDifference | None:
    """Find the first token at which two passes answered differently."""
    for left, right in zip(one.samples, other.samples, strict=True):
        if left.answer != right.answer:
            pairs = enumerate(zip(left.answer, right.answer, strict=False))
            shorter = min(len(left.answer), len(right.answer))
            token = next((place for place, (a, b) in pairs if a != b), shorter)
            return AnswerDifference((one.name, other.name), left.session, left.turn, token, left.margins[token])
    return None
