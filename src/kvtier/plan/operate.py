"""What happens at a given load: where prompts find their KV, what it costs the GPU, how long the first token takes.

The model has one server for each replica, its GPU, and pipes between it and the tiers.

- Reuse: capacity decides residence time, that decides the hits (`kvtier.plan.reuse`). Tiers are inclusive: each holds
  what those above it hold, so a tier adds what its longer residence adds.
- Prefill: ``2 P n`` for n computed tokens and P active parameters, and the attention (`Shape.attention_flop`).
- Decoding: each step reads the weights once and every request's KV (Pope et al., "Efficiently Scaling Transformer
  Inference", 2022, section 2). Its time is shared by the requests of a full batch.
- Waiting: ``W = rho / (1 - rho) (ca2 + cs2) / 2 s`` (Kingman, 1961; exact for independent users, then it is Pollaczek
  and Khinchine's formula). Decoding goes on meanwhile, so it takes its share of the GPU from the prefills.
- Loading: a pipe serves loads one after another, and all are about as large, so that one which takes x alone takes
  ``x (1 + ca2 / 2 rho / (1 - rho))`` (the same formula with cs2 = 0). A prompt whose load would take longer than
  computing it is computed: what a pipe is used for ends where its loads get as slow as that.
"""

import math
from dataclasses import dataclass, replace

from kvtier.plan.setup import Setup

GPU = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One sort of request: how often, and what it does."""

    share: float
    computed_tokens: float
    prompt_tokens: float
    loaded_from: str
    """Name of a tier; empty when nothing is loaded."""
    loaded_tokens: float
    wanted_share: float
    """Share of requests that would be of this sort, were no load too slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The set-up at one load. Rates are of all replicas together; times are means."""

    requests_per_s: float
    with_tiers: bool
    residence_s: dict[str, float]
    """How long each place keeps what it is not asked for."""
    found: dict[str, float]
    """Share of all prompt tokens that each place gives, ``gpu`` among them."""
    computed_tokens: float
    """Of a prompt."""
    prefill_s: float
    load_s: float
    wait_s: float
    ttft_s: float
    tpot_s: float
    gpu_used: float
    """Share of the GPU's time that requests need; above 1 it cannot keep up."""
    gpu_busy: float
    """Share of the time in which it computes, not waiting for a load."""
    gpu_seconds: float
    """Of one request, on one replica."""
    read_bytes_per_s: dict[str, float]
    wanted_bytes_per_s: dict[str, float]
    """What would be read if nothing that was found were computed because loading it is too slow."""
    write_bytes_per_s: dict[str, float]
    link_used: float
    """Of the load stream of a replica."""
    loading: float
    """Requests that load at a time, by Little's law."""

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that are not computed."""
        return sum(self.found.values())


def operate(setup: Setup, requests_per_s: float, *, with_tiers: bool) -> Point:
    """The set-up at a load of so many requests a second, with its tiers or with GPU memory alone."""
    demand, software = setup.demand, setup.inputs.software
    residence_s = residences(setup, requests_per_s, with_tiers=with_tiers)
    visits = _visits(setup, requests_per_s, residence_s, with_tiers=with_tiers)
    rate = requests_per_s / setup.replicas
    read = dict.fromkeys((it.name for it in setup.places), 0.0)
    wanted = dict(read)
    for visit in visits:
        if visit.loaded_from:
            bytes_per_s = requests_per_s * setup.shape.stored_bytes(visit.loaded_tokens)
            read[visit.loaded_from] += visit.share * bytes_per_s
            wanted[visit.loaded_from] += visit.wanted_share * bytes_per_s
    link_used = sum(read.values()) / setup.replicas / setup.load_bytes_per_s
    slowness = _seconds_per_byte(setup, read, link_used)

    prefills = [prefill_s(setup, it.computed_tokens, it.prompt_tokens) for it in visits]
    loads = [
        setup.shape.stored_bytes(it.loaded_tokens) * slowness[it.loaded_from] if it.loaded_from else 0.0
        for it in visits
    ]
    blocking = loads if software.loads_block else [0.0] * len(visits)
    services = [prefill + load for prefill, load in zip(prefills, blocking, strict=True)]
    mean_s = _mean(visits, services)
    square = _mean(visits, [it * it for it in services])
    decode_s = demand.answer_tokens * decode_token_s(setup)
    free = 1 - rate * decode_s
    prefill_mean, load_mean = _mean(visits, prefills), _mean(visits, loads)
    gpu_used = rate * (mean_s + decode_s)
    if free <= 0 or gpu_used >= 1 or not math.isfinite(load_mean):
        wait_s = ttft_s = math.inf
    else:
        busy = rate * mean_s / free
        spread = (setup.inputs.traffic.arrivals_cv2 + square / mean_s**2 - 1) / 2
        wait_s = max(spread, 0.0) * busy / (1 - busy) * mean_s / free
        # A prompt's own prefill shares the GPU with decoding; its load does not.
        ttft_s = wait_s + load_mean + prefill_mean / free
    tpot_s = _tpot_s(setup, rate, mean_s)
    waiting = rate * _mean(visits, blocking)
    return Point(
        requests_per_s=requests_per_s,
        with_tiers=with_tiers,
        residence_s=residence_s,
        found=_found(setup, visits),
        computed_tokens=_mean(visits, [it.computed_tokens for it in visits]),
        prefill_s=prefill_mean,
        load_s=load_mean,
        wait_s=wait_s,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        gpu_used=gpu_used,
        gpu_busy=max(min(1 - waiting, rate * prefill_mean + min(rate * demand.answer_tokens * tpot_s, 1.0)), 0.0),
        gpu_seconds=mean_s + decode_s,
        read_bytes_per_s=read,
        wanted_bytes_per_s=wanted,
        write_bytes_per_s=_writes(setup, requests_per_s, visits) if with_tiers else dict.fromkeys(read, 0.0),
        link_used=link_used,
        loading=requests_per_s * load_mean,
    )


def residences(setup: Setup, requests_per_s: float, *, with_tiers: bool) -> dict[str, float]:
    """How long each place keeps what it is not asked for, in seconds, fastest place first."""
    demand, token_bytes = setup.demand, setup.shape.token_bytes
    # Users stay with their replica, so that the GPUs' memories add up; each keeps the common prefix for itself.
    gpu_tokens = setup.replicas * max(setup.gpu_tokens - demand.prefix_tokens, 0.0)
    residence_s = {GPU: demand.curve.residence(gpu_tokens, requests_per_s)}
    for place in setup.places if with_tiers else ():
        tokens = max(place.capacity_bytes / token_bytes - demand.prefix_tokens, 0.0)
        residence_s[place.name] = demand.curve.residence(tokens, requests_per_s)
    return residence_s


def prefill_s(setup: Setup, computed_tokens: float, prompt_tokens: float) -> float:
    """Seconds in which one replica computes the last tokens of a prompt, alone."""
    linear = 2.0 * setup.inputs.model.active_parameters * computed_tokens
    return (linear + setup.shape.attention_flop(computed_tokens, prompt_tokens)) / setup.flops


def decode_token_s(setup: Setup) -> float:
    """Seconds of one replica that a decoded token takes, when the batch is full."""
    kv_bytes = setup.shape.gpu_bytes(setup.demand.session_tokens)
    reading = (setup.weight_bytes / setup.batch + kv_bytes) / setup.memory_bytes_per_s
    return max(reading, 2.0 * setup.inputs.model.active_parameters / setup.flops)


def fetch_s(setup: Setup, place: str, tokens: float) -> float:
    """Seconds in which a prefix comes from a tier that nobody else uses."""
    return setup.shape.stored_bytes(tokens) * _seconds_per_byte(setup, {}, 0.0)[place]


def _visits(setup: Setup, requests_per_s: float, residence_s: dict[str, float], *, with_tiers: bool) -> list[Visit]:
    demand = setup.demand
    gpu_reuse = not with_tiers or setup.inputs.software.gpu_reuse
    fastest = setup.places[0].name if with_tiers and setup.places else ""
    # The common prefix is always at hand: in GPU memory, or where the engine must look instead.
    prefix_from = "" if gpu_reuse else fastest
    prefix, later = demand.prefix_tokens, 1 - demand.first_share
    visits = [_visit(demand.first_share, prefix, demand.first_tokens, prefix_from, prefix)]
    reached = link_used = 0.0
    lost = later
    for place, seconds in residence_s.items():
        if place == GPU and not gpu_reuse:
            continue
        found = demand.curve.found_within(seconds)
        share = later * max(found - reached, 0.0)
        reached = max(reached, found)
        loaded = 0.0 if place == GPU else max(demand.reusable_tokens - (prefix if gpu_reuse else 0.0), 0.0)
        visit = _visit(share, demand.reusable_tokens, demand.later_tokens, place if loaded else "", loaded)
        if loaded and share:
            kept, used = _worth_loading(setup, visit, requests_per_s, link_used)
            visit = replace(visit, share=share * kept)
            link_used += used
        visits.append(visit)
        lost -= visit.share
    visits.append(_visit(max(lost, 0.0), prefix, demand.later_tokens, prefix_from, prefix))
    return [it for it in visits if it.wanted_share > 0]


def _worth_loading(setup: Setup, visit: Visit, requests_per_s: float, link_used: float) -> tuple[float, float]:
    """Which share of such visits loads before the pipes get slower than the GPU, and what of the link they use."""
    loaded_bytes = setup.shape.stored_bytes(visit.loaded_tokens)
    place = next(it for it in setup.places if it.name == visit.loaded_from)
    array = visit.share * requests_per_s * loaded_bytes / place.read_bytes_per_s
    link = visit.share * requests_per_s / setup.replicas * loaded_bytes / setup.load_bytes_per_s
    if not setup.inputs.software.skips_slow_loads:
        return 1.0, link
    saved_s = prefill_s(setup, visit.computed_tokens + visit.loaded_tokens, visit.prompt_tokens)
    saved_s -= prefill_s(setup, visit.computed_tokens, visit.prompt_tokens)
    array_most = _use_at_most(setup, saved_s * place.read_bytes_per_s / loaded_bytes)
    link_most = _use_at_most(setup, saved_s * setup.load_bytes_per_s / loaded_bytes) - link_used
    kept = max(min(1.0, array_most / array, link_most / link), 0.0)
    return kept, kept * link


def _visit(share: float, hit_tokens: float, prompt_tokens: float, place: str, loaded_tokens: float) -> Visit:
    hit_tokens = min(hit_tokens, prompt_tokens - 1)  # the last token is always computed: it gives the logits
    return Visit(
        share=share,
        computed_tokens=prompt_tokens - hit_tokens,
        prompt_tokens=prompt_tokens,
        loaded_from=place if loaded_tokens else "",
        loaded_tokens=loaded_tokens if place else 0.0,
        wanted_share=share,
    )


def _seconds_per_byte(setup: Setup, read: dict[str, float], link_used: float) -> dict[str, float]:
    """How slowly each place gives bytes to one request, while others load at the given rates."""
    # Where loads block, a replica loads for one request at a time and the stream is all its own.
    link_used = 0.0 if setup.inputs.software.loads_block else link_used
    return {
        it.name: max(
            _stretch(setup, link_used) / setup.load_bytes_per_s,
            _stretch(setup, read.get(it.name, 0.0) / it.read_bytes_per_s) / it.read_bytes_per_s,
        )
        for it in setup.places
    }


def _stretch(setup: Setup, used: float) -> float:
    """How many times longer a load takes on a pipe of which others use so much."""
    return 1 + setup.inputs.traffic.arrivals_cv2 / 2 * used / (1 - used) if used < 1 else math.inf


def _use_at_most(setup: Setup, stretch: float) -> float:
    """How much of a pipe may be used so that loads take so many times longer: `_stretch` the other way round."""
    spread = setup.inputs.traffic.arrivals_cv2 / 2
    return (stretch - 1) / (stretch - 1 + spread) if stretch > 1 else 0.0


def _writes(setup: Setup, requests_per_s: float, visits: list[Visit]) -> dict[str, float]:
    """Bytes a second written to each tier: all that was computed, prompt and answer, goes to every tier."""
    computed = _mean(visits, [it.computed_tokens for it in visits]) + setup.demand.answer_tokens
    bytes_per_s = requests_per_s * computed * setup.shape.token_bytes
    share = setup.inputs.software.write_share
    return {it.name: bytes_per_s * (1.0 if it.name == "host" else share) for it in setup.places}


def _tpot_s(setup: Setup, rate: float, service_s: float) -> float:
    """Time for each further token, at a load of `rate` requests a second on one replica.

    A step takes ``(W + B kv) / bandwidth`` of the time that prefills leave, and B is, by Little's law, the rate times
    the tokens of an answer times this very time: solved for it.
    """
    weights_s = setup.weight_bytes / setup.memory_bytes_per_s
    kv_s = setup.shape.gpu_bytes(setup.demand.session_tokens) / setup.memory_bytes_per_s
    left = 1 - rate * service_s - rate * setup.demand.answer_tokens * kv_s
    return max(weights_s / left, weights_s + kv_s) if left > 0 else math.inf


def _found(setup: Setup, visits: list[Visit]) -> dict[str, float]:
    found = {GPU: 0.0, **{it.name: 0.0 for it in setup.places}}
    for visit in visits:
        hit = visit.prompt_tokens - visit.computed_tokens
        loaded = min(visit.loaded_tokens, hit)
        found[GPU] += visit.share * (hit - loaded)
        if visit.loaded_from:
            found[visit.loaded_from] += visit.share * loaded
    return {name: tokens / setup.demand.input_tokens for name, tokens in found.items()}


def _mean(visits: list[Visit], values: list[float]) -> float:
    return sum(visit.share * value for visit, value in zip(visits, values, strict=True))
