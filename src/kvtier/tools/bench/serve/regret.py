"""Computes regret: the additional time of a planner's choice compared with the best available choice."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.tools.bench.serve.join import (
    COMPUTED,
    ENGINE_PLACES,
    NO_CONNECTOR,
    RESIDENT,
    JoinedRequest,
    JoinedRun,
    Row,
    join,
    number,
    read_run,
)

FIT_POINTS_MIN = 8
FIT_RANGE = 2.0
"""A fit is valid up to this multiple of the largest measured number of tokens."""
OWN_SHARE = 0.9
"""A load counts towards a tier's rate if at least this share of its tokens came from that tier."""

REGRET = (
    "Regret of a request to which KV was offered: its load and prefill, against the fastest alternative that it did "
    "not take. Alternatives are computing all that was not resident, and loading all that was offered and computing "
    "the rest. A slow prefill or load is no regret if the other alternative is slower still. The time of "
    "computing is fitted to prefills of the same record, by computed tokens and tokens before them: all prefills "
    "without a connector, and those of other arms that have fewer tokens than any of these. The time of loading is "
    "the offered tokens over the rate of loads from that tier in the same run. Neither includes waits in the engine's "
    "queue. Regret is at least zero, includes the noise of a prefill, and is unknown if one of these is."
)


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """A formula for prefill seconds, fitted to measurements.

    For n tokens after `before` others it is ``base_s + token_s * n + pair_s * n * (before + n / 2)``.
    """

    base_s: float
    token_s: float
    pair_s: float
    tokens_most: int

    @classmethod
    def of(cls, requests: Iterable[JoinedRequest]) -> "PrefillFit | None":
        """Fit non-negative factors by least squares of the relative errors.

        Return None if fewer than `FIT_POINTS_MIN` requests are usable.
        """
        points: list[tuple[int, int, float]] = []
        for it in requests:
            if it.tokens_by_place is None or it.is_sum_wrong or not it.prefill_s or it.prefill_s < 0:
                continue
            computed = it.tokens_by_place.get(COMPUTED, 0)
            points.append((computed, sum(it.tokens_by_place.values()) - computed, it.prefill_s))
        if len(points) < FIT_POINTS_MIN:
            return None
        computed, before, taken = np.array(points, dtype=float).T
        terms = (
            np.stack([np.ones_like(computed), computed, computed * (before + computed / 2)], axis=1) / taken[:, None]
        )
        kept = [0, 1, 2]
        factors = np.zeros(3)
        while kept:
            solved = _least_squares(terms[:, kept])
            if min(solved) >= 0:
                factors[kept] = solved
                break
            kept.pop(solved.index(min(solved)))
        base_s, token_s, pair_s = factors.tolist()
        return cls(base_s, token_s, pair_s, int(computed.max()))

    def seconds(self, computed: int, before: int) -> float | None:
        """Return the seconds to compute `computed` tokens after `before`, or None far outside the measured range."""
        if computed > FIT_RANGE * self.tokens_most:
            return None
        return self.base_s + self.token_s * computed + self.pair_s * computed * (before + computed / 2)


def _least_squares(terms: npt.NDArray[np.float64]) -> list[float]:
    """Return the factors with which the columns of `terms` add up most nearly to one."""
    found: list[float] = np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)[0].tolist()
    return found


def join_runs(directories: Iterable[Path]) -> list[JoinedRun]:
    """Return all runs of a record, each request with its regret.

    Raises:
        ConfigError: a directory has no readable run.
    """
    joined = [join(read_run(it)) for it in directories]
    plain = [
        request
        for run in joined
        for request in run.requests
        if run.files.arm == NO_CONNECTOR and request.tokens_by_place is not None
    ]
    least = min(((it.tokens_by_place or {}).get(COMPUTED, math.inf) for it in plain), default=0)
    # Other arms compute fewer tokens after a load. Their prefills are fitted too, to avoid extrapolation.
    short = [
        request
        for run in joined
        for request in run.requests
        if run.files.arm != NO_CONNECTOR and (request.tokens_by_place or {}).get(COMPUTED, math.inf) < least
    ]
    fit = PrefillFit.of([*plain, *short]) if plain else None
    return joined if fit is None else [replace(it, requests=list(_with_regret(it, fit))) for it in joined]


def _with_regret(run: JoinedRun, fit: PrefillFit) -> Iterator[JoinedRequest]:
    """Yield the run's requests, each with its regret, as `REGRET` defines it."""
    rates = token_rates(run)
    yield from (replace(it, regret_s=_regret_s(it, fit, rates)) for it in run.requests)


def _regret_s(it: JoinedRequest, fit: PrefillFit, rates: Mapping[str, float]) -> float | None:
    places, offered = it.tokens_by_place, it.offered_tokens
    if places is None or it.is_sum_wrong or it.prefill_s is None or not offered:
        return None
    prompt, resident = sum(places.values()), places.get(RESIDENT, 0)
    # The engine computes at least one token, even if the whole prompt is stored.
    held = min(resident + sum(offered.values()), prompt - 1)
    loaded = prompt - resident - places.get(COMPUTED, 0)
    taken_s = (it.load_s or 0.0) + it.prefill_s
    best_s = taken_s
    if loaded or it.load_s:
        compute_s = fit.seconds(prompt - resident, resident)
        if compute_s is None:
            return None
        best_s = min(best_s, compute_s)
    if loaded < held - resident:
        rest_s = fit.seconds(prompt - held, held)
        if rest_s is None or not offered.keys() <= rates.keys():
            return None
        best_s = min(best_s, rest_s + sum(count / rates[name] for name, count in offered.items()))
    return taken_s - best_s


def token_rates(run: JoinedRun) -> dict[str, float]:
    """Return the tokens per second of loads from each tier, including waits behind other loads.

    Requests that loaded at least `OWN_SHARE` of their tokens from a tier give its rate. Without such requests, the
    tier's objects give it: their bytes over the time in which at least one was being read. Host memory has no objects.
    Its rate then comes from mixed loads: from their time minus the time that their other tokens take.
    """
    tokens: dict[str, float] = {}
    seconds: dict[str, float] = {}
    mixed: list[tuple[dict[str, int], float]] = []
    all_bytes = all_tokens = 0
    for it in run.requests:
        loaded = {name: count for name, count in (it.tokens_by_place or {}).items() if name not in ENGINE_PLACES}
        total = sum(loaded.values())
        if not total or not it.load_s:
            continue
        all_bytes, all_tokens = all_bytes + (it.loaded_bytes or 0), all_tokens + total
        name, most = max(loaded.items(), key=lambda pair: pair[1])
        if most >= OWN_SHARE * total:
            tokens[name] = tokens.get(name, 0) + total
            seconds[name] = seconds.get(name, 0) + it.load_s
        else:
            mixed.append((loaded, it.load_s))
    rates = {name: count / seconds[name] for name, count in tokens.items()}
    for name in {str(row.get("tier")) for row in run.files.objects} - rates.keys():
        read = [row for row in run.files.objects if row.get("tier") == name and row.get("way") == "read"]
        busy_s = _busy_s(read)
        if busy_s and all_bytes:
            payload = sum(number(row, "payload_bytes") or 0.0 for row in read)
            rates[name] = payload / busy_s * all_tokens / all_bytes
    known = dict(rates)
    tokens, seconds = {}, {}
    for loaded, load_s in mixed:
        unknown = loaded.keys() - known.keys()
        if len(unknown) == 1:
            (name,) = unknown
            others_s = sum(count / known[place] for place, count in loaded.items() if place != name)
            tokens[name] = tokens.get(name, 0) + loaded[name]
            seconds[name] = seconds.get(name, 0) + load_s - others_s
    return rates | {name: count / seconds[name] for name, count in tokens.items() if seconds[name] > 0}


def _busy_s(objects: Iterable[Row]) -> float:
    """Return the time in which at least one of `objects` was being read. A read ends at `time_s`."""
    spans = sorted(
        (ended_s - took_s, ended_s)
        for row in objects
        if (ended_s := number(row, "time_s")) is not None and (took_s := number(row, "seconds")) is not None
    )
    busy_s, until_s = 0.0, -math.inf
    for began_s, ended_s in spans:
        busy_s += max(0.0, ended_s - max(began_s, until_s))
        until_s = max(until_s, ended_s)
    return busy_s
