"""Compute how a deployment works at a given load: hits, GPU time, and mean time to first token.

The model has one server for each replica (its GPUs). Loads pass through pipes: the bandwidth of a tier, and the link to
the server.

- Reuse: capacity determines residence time, which determines the hits (`plan.workload`). Tiers are inclusive:
  each holds the KV of the faster ones, so a tier adds the hits of its longer residence.
- Prefill: ``2 P n`` FLOP for n computed tokens and P active parameters, and the attention (`ModelCost.attention_flop`);
  then the exchange among GPUs.
- Decoding: a step launches its kernels, exchanges results between GPUs, and reads the weights once and every request's
  KV (Pope et al., "Efficiently Scaling Transformer Inference", 2022, section 2). It reads the routed experts that its
  tokens use (`Experts`). The requests of a full batch share its time.
- Waiting: ``W = rho / (1 - rho) (ca2 + cs2) / 2 s`` (Kingman, 1961; for independent users it is Pollaczek and
  Khinchine's exact formula). rho is the used share, s the mean service time, and ca2 and cs2 are the squared
  coefficients of variation of arrivals and services. Decoding continues meanwhile and takes a share of the GPU from
  the prefills.
- Loading: a pipe serves loads of about equal size one after another. A load that takes x seconds on an idle pipe takes
  ``x (1 + ca2 / 2 rho / (1 - rho))`` (the same formula with cs2 = 0). A prompt is computed if that is faster than
  loading, so a pipe gets no further loads once they would be slower than computing.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.tools.plan.resolve import Deployment

GPU = "gpu"
_TPOT_STEPS, _TPOT_CLOSE = 60, 1e-6
_TAIL_STEPS = 40
_STORE_CLOSE = 1e-4
_CHUNK_TOKENS = 8192
"""Tokens of a prompt that one step computes: the default of vLLM on GPUs of 70 to 160 GiB."""
_FULL = 1e-9
"""A server counts as full if no more than this share of its GPU's time is left: so little is a rounding error."""
_USE_MAX = 0.99
"""Highest use of a pipe that the planner admits. At full bandwidth the queue would grow without end."""
PipeUse = tuple[float, float]
"""The share of a pipe's time that loads use, and the largest share at which every load is faster than computing."""


class RequestClass(NamedTuple):
    """Requests that find their KV in the same place."""

    share: float
    """Share of all requests."""
    computed_tokens: float
    prompt_tokens: float
    loaded_from: str
    """Name of the tier; empty if nothing is loaded."""
    loaded_tokens: float
    wanted_share: float
    """Share of requests that would be in this class if no load were too slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """The deployment at one load. Rates are for all replicas together; times are means."""

    requests_per_s: float
    residence_s: dict[str, float]
    """Time for which GPU memory and each tier keep unused KV."""
    found: dict[str, float]
    """Share of all prompt tokens found in GPU memory and in each tier."""
    computed_tokens: float
    """Tokens of a mean prompt that are computed."""
    prefill_s: float
    load_s: float
    wait_s: float
    ttft_s: float
    tpot_s: float
    gpu_used: float
    """Share of the GPU's time that requests need; above 1 the queue grows without end."""
    gpu_busy: float
    """Share of the time in which the GPU computes. In the rest it is idle or waits for a load."""
    gpu_seconds: float
    """GPU time of one request, on one replica."""
    read_bytes_per_s: dict[str, float]
    wanted_bytes_per_s: dict[str, float]
    """Reads if every hit were loaded, even where computing it is faster."""
    new_bytes_per_s: float
    """Rate at which requests produce new KV and snapshots. A tier that stores all of them writes at this rate."""
    given_bytes_per_s: dict[str, float]
    """Writes that each tier is given. A tier that cannot write so fast drops some of them."""
    write_bytes_per_s: dict[str, float]
    link_used: float
    """Used share of a replica's load bandwidth."""
    loading: dict[str, float]
    """Mean number of requests that are loading from each tier: their rate times the time of a load (Little's law)."""
    served_s: tuple[tuple[float, float], ...]
    """Share of each class of requests, and the time to first token of that class without waiting."""
    server_busy: float
    """Probability that a request waits."""

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that are not computed."""
        return sum(self.found.values())

    def ttft_within_s(self, share: float) -> float:
        """Return the seconds within which a share of the requests, such as 0.95, gets its first token.

        The waiting time has an exponential tail, ``P(W > t) = rho exp(-rho t / E[W])``: exact for M/M/1, and an
        approximation otherwise (Abate, Choudhury, Whitt, "Exponential approximations for tail probabilities in queues,
        I: waiting times", 1995). The function adds the prefill and load of each class of requests.
        """
        if not math.isfinite(self.ttft_s):
            return math.inf

        def late(seconds: float) -> float:
            return sum(part * self._waits_longer(seconds - own) for part, own in self.served_s)

        low, high = 0.0, max(own for _, own in self.served_s) + self.wait_s
        while late(high) > 1 - share:
            low, high = high, 2 * high
        for _ in range(_TAIL_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if late(middle) > 1 - share else (low, middle)
        return high

    def _waits_longer(self, seconds: float) -> float:
        if seconds < 0:
            return 1.0
        return self.server_busy * math.exp(-self.server_busy * seconds / self.wait_s) if self.wait_s else 0.0


def operate(deployment: Deployment, requests_per_s: float) -> OperatingPoint:
    """Compute the deployment's operating point at a load."""
    load, model = deployment.workload, deployment.model
    residence_s = _residences(deployment, requests_per_s)
    classes, new_bytes_per_s, given = _stored(deployment, requests_per_s, residence_s)
    rate = requests_per_s / deployment.replicas
    read = dict.fromkeys((tier.name for tier in deployment.tiers), 0.0)
    wanted = dict(read)
    for each in classes:
        if each.loaded_from:
            bytes_per_s = requests_per_s * model.loaded_bytes(each.loaded_tokens)
            read[each.loaded_from] += each.share * bytes_per_s
            wanted[each.loaded_from] += each.wanted_share * bytes_per_s
    link_used = sum(read.values()) / deployment.replicas / deployment.load_bytes_per_s
    seconds_per_byte = _seconds_per_byte(deployment, read, link_used)

    prefills = [prefill_s(deployment, each.computed_tokens, each.prompt_tokens) for each in classes]
    loads = [
        model.loaded_bytes(each.loaded_tokens) * seconds_per_byte[each.loaded_from] if each.loaded_from else 0.0
        for each in classes
    ]
    blocking = loads if deployment.inputs.software.loads_block else [0.0] * len(classes)
    services = [prefill + wait for prefill, wait in zip(prefills, blocking, strict=True)]
    mean_s = _mean(classes, services)
    decode_s = load.answer_tokens * decode_token_s(deployment)
    free = 1 - rate * decode_s
    prefill_mean, load_mean = _mean(classes, prefills), _mean(classes, loads)
    gpu_used = rate * (mean_s + decode_s)
    wait_s = ttft_s = busy = math.inf
    if free > 0 and gpu_used < 1 - _FULL and math.isfinite(load_mean):
        busy = rate * mean_s / free
        square = _mean(classes, [it * it for it in services])
        spread = (deployment.inputs.traffic.arrivals_cv2 + square / mean_s**2 - 1) / 2
        wait_s = max(spread, 0.0) * busy / (1 - busy) * mean_s / free
        # A prompt's own prefill shares the GPU with decoding; its load does not.
        ttft_s = wait_s + load_mean + prefill_mean / free
    tpot_s = _tpot_s(deployment, rate, mean_s)
    computing = rate * prefill_mean + min(rate * load.answer_tokens * tpot_s, 1.0)
    return OperatingPoint(
        requests_per_s=requests_per_s,
        residence_s=residence_s,
        found=_found(deployment, classes),
        computed_tokens=_mean(classes, [each.computed_tokens for each in classes]),
        prefill_s=prefill_mean,
        load_s=load_mean,
        wait_s=wait_s,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        gpu_used=gpu_used,
        gpu_busy=max(min(1 - rate * _mean(classes, blocking), computing), 0.0),
        gpu_seconds=mean_s + decode_s,
        read_bytes_per_s=read,
        wanted_bytes_per_s=wanted,
        new_bytes_per_s=new_bytes_per_s,
        given_bytes_per_s=given,
        write_bytes_per_s={it.name: min(given[it.name], it.write_bytes_per_s) for it in deployment.tiers},
        link_used=link_used,
        loading={
            name: requests_per_s
            * sum(each.share * it for each, it in zip(classes, loads, strict=True) if each.loaded_from == name)
            for name in read
        },
        served_s=tuple(
            (each.share, own_s + prefill / free)
            for each, own_s, prefill in zip(classes, loads, prefills, strict=True)
            if free > 0
        ),
        server_busy=min(busy, 1.0),
    )


def prefill_s(deployment: Deployment, computed_tokens: float, prompt_tokens: float) -> float:
    """Return the seconds that one idle replica takes to compute the last `computed_tokens` of a prompt.

    Kernel launches overlap with computing. Exchanges wait until computing ends.
    """
    linear = 2.0 * deployment.inputs.model.active_parameters * computed_tokens
    attention = deployment.model.attention_flop(computed_tokens, prompt_tokens)
    steps = max(computed_tokens / _CHUNK_TOKENS, 1.0)
    computing_s = linear / deployment.flops + attention / deployment.attention_flops
    exchange_s = steps * deployment.exchange_s + computed_tokens * deployment.token_exchange_s
    return max(computing_s, steps * deployment.launch_s) + exchange_s


def step_s(deployment: Deployment, batch: float, session_tokens: float) -> float:
    """Return the seconds that one server takes for a decode step of `batch` requests."""
    return max(fixed_s + batch * each_s for fixed_s, each_s in _step_parts(deployment, batch, session_tokens))


def decode_token_s(deployment: Deployment) -> float:
    """Return the seconds that one replica takes per decoded token, with a full batch."""
    return step_s(deployment, deployment.batch, deployment.workload.session_tokens) / deployment.batch


def _step_parts(deployment: Deployment, batch: float, session_tokens: float) -> list[tuple[float, float]]:
    """Return two pairs: the seconds of a step that its requests share, and the seconds that each request adds.

    The first pair is for a step bounded by reading, the second for one bounded by computing. Reading covers launches,
    the weights that the batch uses, and every request's KV. The exchange waits for whichever takes longer.
    """
    reading_s = deployment.launch_s + deployment.step_weight_bytes(batch) / deployment.memory_bytes_per_s
    kv_s = deployment.model.delivered_bytes(session_tokens) / deployment.memory_bytes_per_s
    computing_s = 2.0 * deployment.inputs.model.active_parameters / deployment.flops
    return [
        (shared_s + deployment.exchange_s, each_s + deployment.token_exchange_s)
        for shared_s, each_s in ((reading_s, kv_s), (0.0, computing_s))
    ]


def fetch_s(deployment: Deployment, tier: str, tokens: float) -> float:
    """Return the seconds to load a prefix of `tokens` from an idle tier."""
    return deployment.model.loaded_bytes(tokens) * _seconds_per_byte(deployment, {}, 0.0)[tier]


def _residences(deployment: Deployment, requests_per_s: float) -> dict[str, float]:
    """Return the residence time of GPU memory and of each tier, in seconds, the fastest first."""
    load = deployment.workload
    # Users stay with their replica, so GPU memories add up; each replica has its own copy of the common prefix.
    held = deployment.replicas * max(deployment.gpu_tokens - load.prefix_tokens, 0.0)
    held *= deployment.inputs.software.gpu_reuse
    found = {GPU: load.curve.residence(held, requests_per_s)}
    for tier in deployment.tiers:
        held = max(tier.capacity_bytes - load.prefix_tokens * deployment.model.token_bytes, 0.0)
        found[tier.name] = deployment.tier_curve.residence(held, requests_per_s)
    return found


def _stored(
    deployment: Deployment, requests_per_s: float, residence_s: dict[str, float]
) -> tuple[list[RequestClass], float, dict[str, float]]:
    """Compute the classes of requests, and the rates of new KV and of each tier's intended writes, in bytes per second.

    New KV is the whole chunks of computed prompts and answers, and the snapshots of recurrent states. Host memory is
    given all of it, every other tier the share ``software.write_share``. A tier that cannot write that fast drops the
    excess. Tokens whose KV is then missing must be recomputed, which produces more new KV, so the calculation repeats
    until it converges. Admission prefers KV that will be reused, so it loses hits only if ``software.write_share`` is
    less than the reused share.
    """
    load, software = deployment.workload, deployment.inputs.software
    reused = load.kept_share or 1.0
    admitted = {
        it.name: 1.0 if it.name == "host" else min(software.write_share / reused, 1.0) for it in deployment.tiers
    }
    kept = admitted
    while True:
        classes = _request_classes(deployment, requests_per_s, residence_s, kept)
        tokens = _mean(classes, [each.computed_tokens for each in classes]) + load.answer_tokens - load.partial_tokens
        new = requests_per_s * (
            max(tokens, 0.0) * deployment.model.token_bytes + software.snapshots * deployment.model.state_bytes
        )
        given = {it.name: new * (1.0 if it.name == "host" else software.write_share) for it in deployment.tiers}
        before = kept
        kept = {
            it.name: admitted[it.name] * (min(it.write_bytes_per_s / given[it.name], 1.0) if given[it.name] else 1.0)
            for it in deployment.tiers
        }
        if all(before.get(name, 1.0) - share < _STORE_CLOSE for name, share in kept.items()):
            return classes, new, given


def _request_classes(
    deployment: Deployment,
    requests_per_s: float,
    residence_s: dict[str, float],
    kept: dict[str, float],
) -> list[RequestClass]:
    load = deployment.workload
    gpu_reuse = deployment.inputs.software.gpu_reuse
    # The common prefix is always cached if it fits: in GPU memory, or else in the fastest tier.
    stored = deployment.model.stored_bytes(load.prefix_tokens)
    holds_prefix = [it.name for it in deployment.tiers if it.capacity_bytes >= stored]
    prefix_from = "" if gpu_reuse or not holds_prefix else holds_prefix[0]
    prefix, later = load.prefix_tokens if gpu_reuse or holds_prefix else 0.0, 1 - load.first_share
    first = _request_class(load.first_share, prefix, load.first_tokens, prefix_from, prefix)
    pipes: dict[str, PipeUse] = {}
    classes = _prefix_classes(deployment, first, requests_per_s, pipes)
    reached = 0.0
    rest = later
    for place, seconds in residence_s.items():
        gain = max(load.curve.found_within(seconds) - reached, 0.0) * kept.get(place, 1.0)
        share = later * gain
        reached += gain
        loaded = 0.0 if place == GPU else max(load.reusable_tokens - (prefix if gpu_reuse else 0.0), 0.0)
        each = _request_class(share, load.reusable_tokens, load.later_tokens, place, loaded)
        if loaded and share:
            each = each._replace(share=share * _worth_loading(deployment, each, requests_per_s, pipes))
        classes.append(each)
        rest -= each.share
    last = _request_class(max(rest, 0.0), prefix, load.later_tokens, prefix_from, prefix)
    classes += _prefix_classes(deployment, last, requests_per_s, pipes)
    return [each for each in classes if each.wanted_share > 0 or each.share > 0]


def _prefix_classes(
    deployment: Deployment, each: RequestClass, requests_per_s: float, pipes: dict[str, PipeUse]
) -> list[RequestClass]:
    """Split requests into those that load the common prefix and those that compute it because that is faster."""
    if not each.loaded_from or not each.share:
        return [each]
    kept = _worth_loading(deployment, each, requests_per_s, pipes)
    computing = _request_class(each.share * (1 - kept), 0.0, each.prompt_tokens, "", 0.0)
    return [each._replace(share=each.share * kept), computing._replace(wanted_share=0.0)]


def _worth_loading(
    deployment: Deployment, each: RequestClass, requests_per_s: float, pipes: dict[str, PipeUse]
) -> float:
    """Return the largest share of the class `each` that can load while no load becomes slower than computing.

    This counts the loads of this class and of earlier ones. `pipes` maps the name of each tier, and an empty name for
    the link, to its use by earlier classes. The function adds the use by this class.
    """
    loaded_bytes = deployment.model.loaded_bytes(each.loaded_tokens)
    tier = next(it for it in deployment.tiers if it.name == each.loaded_from)
    array = each.share * requests_per_s * loaded_bytes / tier.read_bytes_per_s
    link = each.share * requests_per_s / deployment.replicas * loaded_bytes / deployment.load_bytes_per_s
    if not deployment.inputs.software.skips_slow_loads:
        return 1.0
    saved_s = prefill_s(deployment, each.computed_tokens + each.loaded_tokens, each.prompt_tokens)
    saved_s -= prefill_s(deployment, each.computed_tokens, each.prompt_tokens)
    kept = 1.0
    allowed: dict[str, PipeUse] = {}
    for name, rate, use in ((tier.name, tier.read_bytes_per_s, array), ("", deployment.load_bytes_per_s, link)):
        used, most = pipes.get(name, (0.0, math.inf))
        most = min(_use_at_most(deployment, saved_s * rate / loaded_bytes), most)
        kept = max(min(kept, (most - used) / use), 0.0)
        allowed[name] = used, most
    for (name, (used, most)), use in zip(allowed.items(), (array, link), strict=True):
        if kept:
            pipes[name] = used + kept * use, most
    return kept


def _request_class(
    share: float, hit_tokens: float, prompt_tokens: float, place: str, loaded_tokens: float
) -> RequestClass:
    hit_tokens = min(hit_tokens, prompt_tokens - 1)  # the last token is always computed, for the logits
    is_loaded = bool(loaded_tokens and place)
    return RequestClass(
        share=share,
        computed_tokens=prompt_tokens - hit_tokens,
        prompt_tokens=prompt_tokens,
        loaded_from=place if is_loaded else "",
        loaded_tokens=loaded_tokens if is_loaded else 0.0,
        wanted_share=share,
    )


def _seconds_per_byte(deployment: Deployment, read: dict[str, float], link_used: float) -> dict[str, float]:
    """Return the seconds per byte of a load from each tier, while other requests load at the given rates."""
    # Blocking loads run one at a time on a replica, so each has the whole link.
    link_used = 0.0 if deployment.inputs.software.loads_block else link_used
    return {
        tier.name: max(
            _stretch(deployment, link_used) / deployment.load_bytes_per_s,
            _stretch(deployment, read.get(tier.name, 0.0) / tier.read_bytes_per_s) / tier.read_bytes_per_s,
        )
        for tier in deployment.tiers
    }


def _stretch(deployment: Deployment, used: float) -> float:
    """Return how many times as long as on an idle pipe a load takes if others use the share `used` of the pipe."""
    return 1 + deployment.inputs.traffic.arrivals_cv2 / 2 * used / (1 - used) if used < 1 else math.inf


def _use_at_most(deployment: Deployment, stretch: float) -> float:
    """Return the use of a pipe at which loads take `stretch` times as long as on an idle one, at most `_USE_MAX`."""
    spread = deployment.inputs.traffic.arrivals_cv2 / 2
    return min((stretch - 1) / (stretch - 1 + spread), _USE_MAX) if stretch > 1 else 0.0


def _tpot_s(deployment: Deployment, rate: float, service_s: float) -> float:
    """Return the seconds per output token, at a load of `rate` requests per second on one server.

    A step of B requests takes ``F(B) + B e`` seconds: a shared part, and a part for each request (`step_s`). It has
    only the share of the time that prefills leave. By Little's law, B is the rate times the tokens of an answer times
    the result itself. For a constant F the equation has a direct solution. With experts, F grows with B, because more
    of their weights are read. So the solution is repeated: it starts from the full weights and falls to the fixed
    point.
    """
    load = deployment.workload
    batch, tpot_s = math.inf, math.inf
    for _ in range(_TPOT_STEPS if deployment.expert_bytes else 1):
        before_s, tpot_s = tpot_s, 0.0
        for fixed_s, each_s in _step_parts(deployment, batch, load.session_tokens):
            free = 1 - rate * service_s - rate * load.answer_tokens * each_s
            tpot_s = max(tpot_s, fixed_s / free if free > 0 else math.inf, fixed_s + each_s)
        batch = max(rate * load.answer_tokens * tpot_s, 1.0)
        if not before_s - tpot_s >= _TPOT_CLOSE * tpot_s:  # also if both are infinite
            break
    return tpot_s


def _found(deployment: Deployment, classes: list[RequestClass]) -> dict[str, float]:
    found = {GPU: 0.0, **{tier.name: 0.0 for tier in deployment.tiers}}
    for each in classes:
        hit = each.prompt_tokens - each.computed_tokens
        loaded = min(each.loaded_tokens, hit)
        found[GPU] += each.share * (hit - loaded)
        if each.loaded_from:
            found[each.loaded_from] += each.share * loaded
    return {name: tokens / deployment.workload.input_tokens for name, tokens in found.items()}


def _mean(classes: list[RequestClass], values: list[float]) -> float:
    return sum(each.share * value for each, value in zip(classes, values, strict=True))
