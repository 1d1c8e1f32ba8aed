"""Compares a result with the promises of each lossy class, and decides whether the measures can detect a loss."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import geometric_mean

from kvtier.tools.bench.quality.measure import QualityResult, TextRow

KEPT_OF = 400
"""Fewest right answers on exact KV that can prove or disprove a promise."""
TOP1_BELOW = 0.02
TURNS_FACTOR = 1.5
"""Limit on the KL of a chain's last turn, as a multiple of the KL after KV that was stored only once."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The promises of a lossy class. Limits on the KL are multiples of the KL of bf16 arithmetic on the same text."""

    ratio: float
    kl: float
    """Limit on the KL of each text."""
    mean_kl: float
    """Limit on the geometric mean of the KL over the texts."""
    kept: float
    """Least share of answers that stay right."""


PROMISES: Mapping[str, Promise] = {"k8v4": Promise(0.41, 1, 1, 0.99), "int4": Promise(0.30, 6, 4, 0.97)}
RIVALS: Mapping[str, str] = {"fp8": "k8v4", "rotation": "int4", "int2": "int4"}
"""References, each with the class whose promise it must break. If it does not, the measures prove nothing."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One limit, and whether the measured value is within it."""

    model: str
    codec: str
    what: str
    value: float
    limit: float
    is_met: bool


def gates(result: QualityResult) -> list[Gate]:
    """Return the limits of all measured classes, and whether each reference breaks a limit of its class."""
    found: list[Gate] = []
    for model in dict.fromkeys(it.model for it in (*result.results, *result.tasks, *result.turns)):
        for codec, promise in PROMISES.items():
            found += _limits(result, model, codec, promise)
        for codec, rival in RIVALS.items():
            limits = [*_limits(result, model, codec, PROMISES[rival], is_reference=True)]
            if limits:
                broken = sum(not it.is_met for it in limits)
                found.append(Gate(model, codec, f"breaks a promise of {rival}", broken, 1, broken > 0))
    return found


def _limits(
    result: QualityResult, model: str, codec: str, promise: Promise, *, is_reference: bool = False
) -> Iterator[Gate]:
    rows = [it for it in result.results if (it.model, it.codec) == (model, codec)]
    for row in rows:
        multiple = row.kl / row.noise_kl
        yield _most(row, f"KL in N, {row.text}", multiple, promise.kl)
        if not is_reference:
            yield _most(row, f"of raw bytes, {row.text}", row.ratio, promise.ratio)
        least = row.noise_top1 - TOP1_BELOW
        yield Gate(model, codec, f"top-1, {row.text}", row.top1, least, row.top1 >= least - 1e-9)
    if rows:
        mean = geometric_mean(max(it.kl / it.noise_kl, 1e-12) for it in rows)
        yield _most(rows[0], "KL in N, geometric mean", mean, promise.mean_kl)
    for row in result.tasks:
        if (row.model, row.codec) == (model, codec) and row.of:
            share = row.kept / row.of
            yield Gate(model, codec, "right answers kept", share, promise.kept, share >= promise.kept)
            if not is_reference:
                yield Gate(model, codec, "right answers on exact KV", row.of, KEPT_OF, row.of >= KEPT_OF)
    for row in result.turns:
        if (row.model, row.codec) == (model, codec):
            growth = row.kl_by_turn[-1] / row.kl_once
            yield Gate(
                model, codec, "KL of the last turn, of that of once", growth, TURNS_FACTOR, growth <= TURNS_FACTOR
            )


def _most(row: TextRow, what: str, value: float, limit: float) -> Gate:
    return Gate(row.model, row.codec, what, value, limit, value <= limit)
