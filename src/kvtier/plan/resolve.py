"""Inputs resolved to deployments: missing values from the catalogue and the model, and what all formulas share.

A deployment has one size: the GPUs that share a copy of the model. They split every layer (tensor parallelism), so one
server computes with all of them; or they split the experts only, and each is a server with the attention and the KV of
its own requests (data-parallel attention with expert parallelism: DeepSeek-V3 technical report, 2024, section 3.4).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from kvtier import size
from kvtier.errors import ConfigError
from kvtier.plan.hardware import KINDS, HardwareItem, find
from kvtier.plan.inputs import Inputs
from kvtier.plan.model_cost import Experts, ModelCost, model_cost
from kvtier.plan.workload import ReuseCurve, TraceSummary, Workload, workload
from kvtier.size.capacity import WEIGHT_BYTES
from kvtier.size.sizes import TP_MAX

SEARCHED = "the smallest size that serves the load and nearly the most users"
"""Origin of a `model.tp` that is not given."""
_FROM_CATALOGUE = {
    "gpu": ("flops", "attention_flops", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "exchange", "watts"),
    "disk": ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s", "drive_writes_per_day", "watts"),
    "host": ("channel_bytes_per_s",),
    "shared": ("adapter_bytes_per_s",),
}
"""Inputs of each section that the catalogue has."""
_PER_HOST = ("host.capacity_bytes", "host.channels", "disk.count", "shared.adapters")
"""Totals whose default is that of one host."""
_SERVER_GPUS = 8
"""GPUs of the server whose power is the default of `power.server_watts`."""
_UNKNOWN_EXCHANGE = "pcie5"
"""For a GPU that is not in the catalogue: every server has PCIe."""
_ACTIVATION_BYTES = 2
"""Bytes of an element that GPUs exchange; experts get it in one byte (DeepEP) and return it in these."""


@dataclass(slots=True)
class Basis:
    """What inputs name, read once for many changes of the other inputs."""

    model: size.Model
    experts: Experts
    trace: TraceSummary | None
    costs: dict[tuple[object, ...], ModelCost]
    """Costs of the model, by all that they depend on."""


def read_basis(inputs: Inputs) -> Basis:
    """Read the model and the trace that the inputs name.

    Raises:
        ConfigError: the model or the trace is unknown or malformed.
    """
    ignored = [name.strip() for name in inputs.model.ignore.split(",") if name.strip()]
    found, trace = size.model(inputs.model.name, ignored), None
    for name in ("traffic.trace_time_unit", "traffic.trace_window_s", "traffic.load"):
        if name in inputs.origins and not inputs.traffic.trace:
            raise ConfigError(
                f"{name} = {inputs.value(name)!r} (from {inputs.origin(name)}): it is about a trace, and the plan has "
                "none; allowed: with --trace FILE"
            )
    if inputs.traffic.trace:
        from kvtier.plan.trace import read_trace  # noqa: PLC0415 - imports numpy and the trace readers

        trace = read_trace(Path(inputs.traffic.trace), inputs.traffic.trace_window_s, inputs.traffic.trace_time_unit)
    return Basis(found, Experts(*found.experts), trace, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class TierHardware:
    """One tier below GPU memory, of all hosts together."""

    name: str
    capacity_bytes: float
    """Capacity for KV."""
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One set of inputs at one size, resolved; all formulas start here."""

    inputs: Inputs
    model: ModelCost
    workload: Workload
    basis: Basis
    replicas: int
    """Servers: copies of the model, each on `model.tp` GPUs; with data-parallel attention every GPU."""
    flops: float
    """FLOP/s that one server reaches in prefill, with the weights."""
    attention_flops: float
    """The same in attention, in the format of the KV."""
    memory_bytes_per_s: float
    """Bandwidth that one server reaches in decoding."""
    launch_s: float
    """Least time of a step: all layers, each kernel after the one before."""
    exchange_s: float
    """Time of a step in which its GPUs exchange, whatever its tokens."""
    token_exchange_s: float
    """Further time for each token of the step."""
    load_bytes_per_s: float
    """Load bandwidth of one server, in stored bytes."""
    weight_bytes: float
    """Weights of one copy of the model."""
    dense_bytes: float
    """Weights on one server that each decode step reads."""
    expert_bytes: float
    """Weights of routed experts on one server: a step reads those that its tokens use."""
    experts: Experts
    kv_bytes: float
    """GPU memory for KV, of one server."""
    gpu_tokens: float
    """Tokens that fit in it, in sessions of the workload's length."""
    batch: int
    """Requests that decode together when the server is full."""
    tiers: tuple[TierHardware, ...]
    """Fastest first, without those of no capacity."""
    tier_curve: ReuseCurve
    """The workload's curve with snapshots of recurrent states, in tokens of equal size."""
    sources: tuple[tuple[str, str, str], ...]
    """Name, source and date of each catalogue entry used."""

    @property
    def copies(self) -> int:
        """Copies of the weights."""
        return self.inputs.gpu.count // self.inputs.model.tp

    @property
    def used_gpus(self) -> int:
        """GPUs of all copies; the others are idle."""
        return self.copies * self.inputs.model.tp

    @property
    def server_gpus(self) -> int:
        """GPUs of one server."""
        return self.used_gpus // self.replicas

    @property
    def hosts(self) -> int:
        """Hosts that hold the GPUs."""
        return -(-self.inputs.gpu.count // self.inputs.host.gpus)

    def step_weight_bytes(self, batch: float) -> float:
        """Weights that a decode step of one server reads, whose batch has `batch` requests.

        Servers that share the experts decode together, each with such a batch.
        """
        if not self.expert_bytes:
            return self.dense_bytes
        shared_by = self.replicas // self.copies
        return self.dense_bytes + self.expert_bytes * self.experts.read_share(batch * shared_by)

    def without(self, *names: str) -> "Deployment":
        """The same deployment without some of its tiers."""
        return replace(self, tiers=tuple(it for it in self.tiers if it.name not in names))


def resolve(inputs: Inputs, basis: Basis | None = None) -> Deployment:
    """Resolve the inputs at their size, or at the smallest that holds the model where they have none.

    Args:
        inputs: from `kvtier.plan.read_inputs`.
        basis: what they name, if it has been read already.

    Raises:
        ConfigError: an unknown model or part, GPUs that cannot hold the model, a prompt that no replica can hold.
    """
    return next(deployments(inputs, basis))


def deployments(inputs: Inputs, basis: Basis | None = None) -> Iterator[Deployment]:
    """The deployment at each size that holds the model, the smallest first, or at the size that the inputs give.

    Sizes divide the GPUs, or are powers of two that may leave some of them idle. Those of more than one host are
    tried where no smaller one holds the model.

    Raises:
        ConfigError: as in `resolve`.
    """
    basis = basis or read_basis(inputs)
    found = basis.model
    as_given = inputs
    inputs, sources = _completed(as_given, inputs.gpu.count, found)
    load = workload(inputs, basis.trace)
    if found.tokens_max is not None and load.longest_tokens > found.tokens_max:
        raise ConfigError(
            f"the longest prompt and its answer have {load.longest_tokens:,.0f} tokens: {found.name} allows at most "
            f"{found.tokens_max:,}; allowed: "
            + ("a trace of shorter prompts" if basis.trace else "fewer turns, a shorter history or shorter answers")
        )
    given, count = inputs.model.tp, inputs.gpu.count
    if count < given:
        origin = inputs.origin("gpu.count")
        raise ConfigError(f"gpu.count = {count} (from {origin}): fewer than model.tp = {given}")
    experts = Experts(
        inputs.model.experts or basis.experts.routed, inputs.model.experts_per_token or basis.experts.used
    )
    refused, fits = "", False
    for tp, dp in _sizes(inputs, experts):
        if fits and tp > inputs.host.gpus:
            return
        sized = _completed(as_given, count // tp * tp, found)[0] if count % tp else inputs
        sized = sized if given else sized.change({"model.tp": tp, "model.dp_attention": dp}, SEARCHED)
        sized, exchange = _with_exchange(sized)
        try:
            model = _model_cost(sized, basis)
        except ConfigError:
            if given or tp == 1:  # some numbers of ranks cannot share the heads; one can, unless the model is refused
                raise
            continue
        deployment = _deployment(sized, model, load, experts, basis, (*sources, *exchange))
        why = _does_not_fit(deployment, named=bool(given))
        if not why:
            fits = True
            yield deployment
        elif not (dp and refused):  # with such attention each GPU needs more
            refused = why
    if not fits:
        raise ConfigError(f"{refused}; allowed: more or larger GPUs, smaller weights or a smaller kv_dtype")


def _sizes(inputs: Inputs, experts: Experts) -> Iterator[tuple[int, bool]]:
    """Sizes to try, and whether attention is data-parallel, which needs experts that GPUs can share."""
    given, count = inputs.model.tp, inputs.gpu.count
    if given:
        yield given, inputs.model.dp_attention
        return
    sizes = (it for it in range(1, min(count, TP_MAX) + 1) if count % it == 0 or it.bit_count() == 1)
    for tp, dp in product(sizes, (False, True)):
        if not dp or (1 < tp <= experts.routed):
            yield tp, dp


def _deployment(
    inputs: Inputs,
    model: ModelCost,
    load: Workload,
    experts: Experts,
    basis: Basis,
    sources: tuple[tuple[str, str, str], ...],
) -> Deployment:
    gpu, tp, software = inputs.gpu, inputs.model.tp, inputs.software
    weight_bytes = inputs.model.parameters * WEIGHT_BYTES[inputs.model.weights]
    expert_bytes = experts.bytes_of(weight_bytes, inputs.model.parameters, inputs.model.active_parameters)
    dense_bytes = weight_bytes - expert_bytes
    gpus = tp
    if inputs.model.dp_attention:  # each GPU has all other weights and its part of the experts
        gpus, expert_bytes = 1, expert_bytes / tp
    kv_bytes = gpus * (gpu.memory_bytes * gpu.memory_share - gpu.other_bytes) - dense_bytes - expert_bytes
    session_bytes = model.gpu_bytes(load.session_tokens)
    launch_s, exchange_s, token_exchange_s = _step_times(inputs, experts, basis.model)
    loaded_tokens = max(load.reusable_tokens, 1.0)
    stream = min(software.load_bytes_per_s or math.inf, gpu.link_bytes_per_s * software.link_share)
    return Deployment(
        inputs=inputs,
        model=model,
        workload=load,
        basis=basis,
        replicas=gpu.count // tp * tp // gpus,
        flops=gpus * gpu.flops * (gpu.expert_flops_share if experts.routed > 1 else gpu.flops_share),
        attention_flops=gpus * gpu.attention_flops * gpu.flops_share,
        memory_bytes_per_s=gpus * gpu.memory_bytes_per_s * gpu.memory_rate_share,
        launch_s=launch_s,
        exchange_s=exchange_s,
        token_exchange_s=token_exchange_s,
        load_bytes_per_s=gpus * stream * model.loaded_bytes(loaded_tokens) / model.delivered_bytes(loaded_tokens),
        weight_bytes=weight_bytes,
        dense_bytes=dense_bytes,
        expert_bytes=expert_bytes,
        experts=experts,
        kv_bytes=kv_bytes,
        gpu_tokens=kv_bytes / session_bytes * load.session_tokens,
        batch=min(gpu.batch_max, int(kv_bytes / session_bytes)),
        tiers=_tiers(inputs),
        tier_curve=load.curve.with_snapshots(software.snapshots * model.state_bytes / model.token_bytes),
        sources=sources,
    )


def _step_times(inputs: Inputs, experts: Experts, model: size.Model) -> tuple[float, float, float]:
    """Seconds of a step for launches, for exchanges, and for what each token adds to the exchanges.

    GPUs that split each layer sum its attention and its MLP, an all-reduce each (Shoeybi et al., "Megatron-LM", 2019,
    section 3). Those that share the experts only send tokens to them and back (DeepEP, 2025). Between hosts each GPU
    sends its part of a sum, or one copy of a token to each of them, over a network adapter of its own.
    """
    gpu, tp, layers = inputs.gpu, inputs.model.tp, float(len(model.layers))
    if () in model.layers:  # where an MLP is a layer of its own, two are one of the others
        layers /= 2
    width = model.hidden_size or 128 * (model.attention_heads or 1)
    launch_s = layers * (gpu.layer_s + (gpu.expert_layer_s if experts.routed > 1 else 0.0))
    if tp == 1:
        return launch_s, 0.0, 0.0
    near, hosts = min(tp, inputs.host.gpus), -(-tp // inputs.host.gpus)
    waits_s = 2 * (gpu.exchange_wait_s + (gpu.host_latency_s if hosts > 1 else 0.0))
    if inputs.model.dp_attention:
        fixed_s, token_bytes = gpu.dispatch_s, width * (1 + _ACTIVATION_BYTES)
        sent, sent_far = min(experts.used, tp - 1), min(experts.used, hosts - 1)
    else:
        fixed_s, token_bytes = 2 * gpu.exchange_latency_s, 2 * 2 * width * _ACTIVATION_BYTES
        sent, sent_far = (near - 1) / near, (hosts - 1) / hosts / near
    sent_s = sent / gpu.exchange_bytes_per_s + sent_far / gpu.adapter_bytes_per_s
    return launch_s, layers * (fixed_s + waits_s), layers * token_bytes * sent_s


def _model_cost(inputs: Inputs, basis: Basis) -> ModelCost:
    dtype, chunk_tokens, copies = inputs.model.kv_dtype, inputs.software.chunk_tokens, inputs.software.copies
    tp = 1 if inputs.model.dp_attention else inputs.model.tp
    key = (dtype, tp, chunk_tokens, copies)
    if key not in basis.costs:
        kv = size.of(basis.model, dtype=dtype, tp=tp, chunk_tokens=chunk_tokens)
        if not kv.bytes_per_token:
            raise ConfigError(
                f"model {basis.model.name}: it keeps no KV that grows with its tokens, so there is nothing for tiers "
                "to hold; allowed: models with attention layers"
            )
        basis.costs[key] = model_cost(kv, copies)
    return basis.costs[key]


def _does_not_fit(deployment: Deployment, *, named: bool) -> str:
    """Why the GPUs cannot hold the model and its longest session; empty where they can."""
    inputs, load, gpus = deployment.inputs, deployment.workload, deployment.server_gpus
    needed = deployment.model.gpu_bytes(max(load.longest_tokens, load.session_tokens))
    if deployment.kv_bytes >= needed:
        return ""
    origin = f" (from {inputs.origin('model.tp')})" if named else ""
    return (
        f"model.tp = {inputs.model.tp}{origin}: {gpus} x {inputs.gpu.name} leave "
        f"{max(deployment.kv_bytes, 0) / 1e9:.1f} GB for KV next to "
        f"{(deployment.dense_bytes + deployment.expert_bytes) / 1e9:.1f} GB of weights in {inputs.model.weights} "
        f"(--weights), the longest session needs {needed / 1e9:.1f} GB"
    )


def _completed(inputs: Inputs, used_gpus: int, found: size.Model) -> tuple[Inputs, tuple[tuple[str, str, str], ...]]:
    """The inputs with the totals of all hosts, the catalogue's hardware and the model's parameters; and the sources."""
    return _with_hardware(_with_parameters(_with_hosts(inputs, used_gpus), found))


def _with_hosts(inputs: Inputs, used_gpus: int) -> Inputs:
    """The inputs with the default totals of the hosts of `used_gpus`, since the memory of an idle host serves no copy.

    A total that is given stays, and a probe measures one host.
    """
    hosts = -(-used_gpus // inputs.host.gpus)
    values: dict[str, object] = {
        name: hosts * inputs.value(name)  # type: ignore[operator]
        for name in _PER_HOST
        if inputs.origins.get(name, "probe").startswith("probe")
    }
    inputs = inputs.change(values, f"default, for {hosts} hosts") if hosts > 1 else inputs
    if "power.server_watts" in inputs.origins or inputs.gpu.count == _SERVER_GPUS:
        return inputs
    watts = inputs.power.server_watts * inputs.gpu.count / _SERVER_GPUS
    return inputs.change({"power.server_watts": watts}, f"default, for {inputs.gpu.count} GPUs")


def _tiers(inputs: Inputs) -> tuple[TierHardware, ...]:
    host, disk, shared = inputs.host, inputs.disk, inputs.shared
    host_rate = host.channels * host.channel_bytes_per_s * host.share
    network_rate = shared.adapters * shared.adapter_bytes_per_s
    tiers = (
        TierHardware(
            name="host",
            capacity_bytes=host.capacity_bytes,
            read_bytes_per_s=host_rate,
            write_bytes_per_s=host_rate,
        ),
        TierHardware(
            name="disk",
            capacity_bytes=disk.count * disk.capacity_bytes * disk.filled,
            read_bytes_per_s=disk.count * disk.read_bytes_per_s,
            write_bytes_per_s=disk.count * disk.write_bytes_per_s,
        ),
        TierHardware(
            name="shared",
            capacity_bytes=shared.capacity_bytes,
            read_bytes_per_s=network_rate,
            write_bytes_per_s=network_rate,
        ),
    )
    return tuple(tier for tier in tiers if tier.capacity_bytes)


def _with_hardware(inputs: Inputs) -> tuple[Inputs, tuple[tuple[str, str, str], ...]]:
    """The inputs with missing hardware figures from the catalogue, and its entries used."""
    used = {
        "gpu": True,
        "disk": inputs.disk.count > 0,
        "host": inputs.host.capacity_bytes > 0,
        "shared": inputs.shared.capacity_bytes > 0,
    }
    sources: list[tuple[str, str, str]] = []
    for kind, named_by in KINDS.items():
        section = named_by.partition(".")[0]
        missing = [key for key in _FROM_CATALOGUE[section] if not inputs.value(f"{section}.{key}")]
        own = {"attention_flops": inputs.gpu.flops, "exchange": _UNKNOWN_EXCHANGE}
        if set(missing) <= own.keys():  # a GPU that is not in the catalogue
            inputs = inputs.change({f"gpu.{key}": own[key] for key in missing}, "a GPU with figures of its own")
            continue
        if kind != "exchange" and used[section] and missing:  # an exchange has the figures of a size
            item = find(kind, str(inputs.value(named_by)), inputs.origin(named_by))
            values = {f"{section}.{key}": _catalogue_value(inputs, item, key) for key in missing}
            inputs = inputs.change(values, f"catalogue {item.name}")
            sources.append((item.name, item.source, item.date))
    return inputs, tuple(sources)


def _with_exchange(inputs: Inputs) -> tuple[Inputs, tuple[tuple[str, str, str], ...]]:
    """The inputs with the figures of the exchange among as many GPUs as a copy has, and their source."""
    found = {"exchange_latency_s": "latency_s", "exchange_bytes_per_s": "bytes_per_s", "dispatch_s": "dispatch_s"}
    missing = {name: key for name, key in found.items() if not inputs.value(f"gpu.{name}")}
    if inputs.model.tp == 1 or not missing:
        return inputs, ()
    item = find("exchange", inputs.gpu.exchange, inputs.origin("gpu.exchange"))
    values = {f"gpu.{name}": _of_size(item.values[key], inputs.model.tp) for name, key in missing.items()}
    return inputs.change(values, f"catalogue {item.name}"), ((item.name, item.source, item.date),)


def _of_size(figure: float | dict[str, float], tp: int) -> float:
    """A figure, or that of the next larger number of GPUs that was measured."""
    if not isinstance(figure, dict):
        return figure
    return figure[min((it for it in figure if int(it) >= tp), default=max(figure, key=int), key=int)]


def _catalogue_value(inputs: Inputs, item: HardwareItem, key: str) -> float | str:
    value = item.values["flops" if key == "attention_flops" else key]
    if key == "attention_flops":
        # KV of fewer bits than eight is widened before it is multiplied.
        return float(value.get("fp8" if inputs.model.kv_dtype.startswith("fp8") else "bf16", value["bf16"]))
    if key == "flops":
        # Weights of four bits are counted at the rate of eight: their kernels widen them, or prefill is not faster.
        # A GPU without a rate for eight bits widens them to sixteen (Marlin).
        value = value.get("fp8" if inputs.model.weights in {"fp8", "fp4"} else "bf16", value["bf16"])
    if isinstance(value, str):
        return value
    return int(value) if key in {"memory_bytes", "capacity_bytes"} else float(value)


def _with_parameters(inputs: Inputs, model: size.Model) -> Inputs:
    values: dict[str, object] = {"model.weights": model.weights} if inputs.model.weights == "auto" else {}
    total = inputs.model.parameters
    if not total:
        if model.parameters_billion is None:
            raise ConfigError(
                f"model {model.name}: the number of its parameters is not known; set model.parameters and "
                "model.active_parameters"
            )
        total = values["model.parameters"] = model.parameters_billion * 1e9
    if not inputs.model.active_parameters:
        active = model.active_billion or model.parameters_billion
        values["model.active_parameters"] = active * 1e9 if active else total
    return inputs.change(values, f"model {model.name}")
