"""What a demo found: every request of every pass, and the sums that the table, the JSON and the report are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

import numpy as np

RESTORED_SHARE_MIN = 0.9
"""The warm pass must restore at least this share of what an independent count says can be restored."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of one pass."""

    session: int
    turn: int
    prompt_tokens: int
    answer: tuple[int, ...]
    ttft_ms: float
    """From calling `generate` to the first new token."""
    total_ms: float
    """From calling `generate` to its return."""
    restored: Mapping[str, int]
    """Leading prompt tokens whose KV was brought back, by the place it came from."""
    restorable_tokens: int
    """What the oracle says; 0 in the pass without kvtier."""
    margins: tuple[float, ...]
    """For each token of the answer, the distance between the logits of the best and the second best token."""

    @property
    def restored_tokens(self) -> int:
        """Of all places."""
        return sum(self.restored.values())

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt_tokens - self.restored_tokens


@dataclass(frozen=True, slots=True)
class Pass:
    """All requests, sent once through one process."""

    name: str
    samples: tuple[Sample, ...]
    set_up_s: float
    """Making the model, one short request to warm up, and attaching kvtier."""
    wall_s: float
    """From the first request to the last answer, and until everything that was stored is on disk."""
    flush_s: float
    """The part of `wall_s` after the last answer."""
    lost: int = 0
    """Stored objects that did not reach the disk in time."""
    disk_bytes: int = 0
    """Bytes of the store's files after this pass."""
    written_bytes: int = 0
    """By how much `disk_bytes` grew in this pass."""
    load: float = 0.0
    """Processes that wanted to run on this machine, over the minute before the pass; the demo's own ones included."""

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(it.prompt_tokens for it in self.samples)

    @property
    def restored_tokens(self) -> int:
        """Prompt tokens whose KV was brought back."""
        return sum(it.restored_tokens for it in self.samples)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return sum(it.computed_tokens for it in self.samples)

    @property
    def restorable_tokens(self) -> int:
        """Prompt tokens that a perfect cache would have brought back."""
        return sum(it.restorable_tokens for it in self.samples)

    @property
    def restored_by_tier(self) -> dict[str, int]:
        """Restored tokens by the place they came from."""
        total: dict[str, int] = {}
        for sample in self.samples:
            for place, tokens in sample.restored.items():
                total[place] = total.get(place, 0) + tokens
        return total

    @property
    def hit_rate(self) -> float:
        """Restored tokens over input tokens."""
        return self.restored_tokens / self.input_tokens

    @property
    def restored_share(self) -> float:
        """Restored tokens over restorable tokens; 1 where there was nothing to restore."""
        return self.restored_tokens / self.restorable_tokens if self.restorable_tokens else 1.0

    @property
    def prefill_share(self) -> float:
        """Time to first token over the whole time, summed over all requests."""
        return sum(it.ttft_ms for it in self.samples) / sum(it.total_ms for it in self.samples)

    def ttft_ms(self, percent: float) -> float:
        """A percentile of the time to first token; between two samples it is interpolated."""
        return float(np.percentile([it.ttft_ms for it in self.samples], percent))

    def as_dict(self) -> dict[str, object]:
        """The sums by the names of the JSON contract."""
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
class Difference:
    """The first place where two passes gave different tokens."""

    passes: tuple[str, str]
    session: int
    turn: int
    token: int
    margin: float
    """Logits between the best two tokens in the first pass; as small as float32's rounding means a tie, no wrong KV."""

    def __str__(self) -> str:
        one, other = self.passes
        return (
            f"passes {one} and {other} differ from token {self.token} of the answer in turn {self.turn + 1} of "
            f"conversation {self.session + 1} on (where the best two tokens were {self.margin:.1e} apart)"
        )


@dataclass(frozen=True, slots=True)
class DemoResult:
    """A whole demo."""

    model: str
    """The model in one line."""
    why: str
    """Why this model."""
    conversations: str
    """Which requests, in one line."""
    shape: Mapping[str, int]
    parameters: int
    kv_bytes_per_token: int
    seed: int
    threads: int
    chunk_tokens: int
    new_tokens: int
    passes: tuple[Pass, ...]
    elapsed_s: float
    """From the start of the command to the end of the last pass."""
    tokenizer_s: float
    directory: str | None
    """The store, where it was kept."""
    machine: Mapping[str, object]
    software: Mapping[str, str]
    cache_settings: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """kvtier's own settings: (value, where from) by name."""
    notes: tuple[str, ...] = ()

    def find_pass(self, name: str) -> Pass:
        """The pass of that name."""
        return next(it for it in self.passes if it.name == name)

    @property
    def difference(self) -> Difference | None:
        """The first difference between the tokens of the first pass and those of another; None when there is none."""
        first, *others = self.passes
        found = (find_difference(first, other) for other in others)
        return next((it for it in found if it is not None), None)

    @property
    def is_identical(self) -> bool:
        """Whether all passes gave the same tokens for every request."""
        return self.difference is None

    @property
    def is_good(self) -> bool:
        """Whether the demo shows what it promises: the same tokens, and enough of them not computed again."""
        return self.is_identical and self.find_pass("warm").restored_share >= RESTORED_SHARE_MIN

    @property
    def margin(self) -> float:
        """The closest greedy choice of all passes, in logits."""
        return min(margin for it in self.passes for sample in it.samples for margin in sample.margins)

    @property
    def rounding(self) -> float:
        """The largest change of a margin between the first pass and another: what rounding does to logits."""
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
        """What kvtier costs where it cannot help.

        Returns:
            The median, over the requests for which the cold pass restored nothing, of its time to first token over that
            of the pass without kvtier; and how many requests that were. None when there were none.
        """
        pairs = zip(self.find_pass("none").samples, self.find_pass("cold").samples, strict=True)
        ratios = [cold.ttft_ms / none.ttft_ms for none, cold in pairs if not cold.restored_tokens]
        return (median(ratios), len(ratios)) if ratios else None

    def speed_up(self, name: str, percent: float = 50) -> float:
        """Time to first token without kvtier over that of the pass `name`, at a percentile."""
        return self.find_pass("none").ttft_ms(percent) / self.find_pass(name).ttft_ms(percent)

    def as_dict(self) -> dict[str, object]:
        """The result by the names of the JSON contract, without the samples."""
        cost = self.miss_cost
        difference = self.difference
        return {
            "model": self.model,
            "identical": self.is_identical,
            "passes": [it.as_dict() for it in self.passes],
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
        """Every request of every pass, for the record."""
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


def find_difference(one: Pass, other: Pass) -> Difference | None:
    """The first place where two passes gave different tokens."""
    for left, right in zip(one.samples, other.samples, strict=True):
        if left.answer != right.answer:
            token = _first_difference(left.answer, right.answer)
            return Difference(
                passes=(one.name, other.name),
                session=left.session,
                turn=left.turn,
                token=token,
                margin=left.margins[token],
            )
    return None


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))
