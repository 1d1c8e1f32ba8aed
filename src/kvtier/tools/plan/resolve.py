"""Resolve inputs to deployments: add values from the catalogue and the model, and compute the terms of all formulas.

A deployment has one size, the number of GPUs that share a copy of the model. With tensor parallelism, these GPUs split
every layer, and one server computes with all of them. With data-parallel attention and expert parallelism (DeepSeek-V3
technical report, 2024, section 3.4), they split only the experts. Each GPU is then a server with the attention and KV
of its own requests.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.tools import size
from kvtier.tools.plan.hardware import KINDS, HardwareItem, find
from kvtier.tools.plan.inputs import Inputs
from kvtier.tools.plan.model_cost import Experts, ModelCost, model_cost
from kvtier.tools.plan.workload import ReuseCurve, TraceSummary, Workload, workload
from kvtier.tools.size.sizes import TP_MAX, WEIGHT_BYTES

SEARCHED = "the smallest size that serves most users"
"""Origin of a `model.tp` that is not given."""
_FROM_CATALOGUE = {
    "gpu": ("flops", "attention_flops", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "exchange", "watts"),
    "disk": ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s", "drive_writes_per_day", "watts"),
    "host": ("channel_bytes_per_s",),
    "shared": ("adapter_bytes_per_s",),
}
"""Inputs of each section that the catalogue can supply."""
_PER_HOST = ("host.capacity_bytes", "host.channels", "disk.count", "shared.adapters")
"""Totals whose default is for one host."""
_SERVER_GPUS = 8
"""GPUs in the server whose power is the default of `power.server_watts`."""
_UNKNOWN_EXCHANGE = "pcie5"
"""Exchange that is assumed for a GPU outside the catalogue, because every server has PCIe."""
_ACTIVATION_BYTES = 2
"""Bytes per element that GPUs exchange. Experts receive one byte per element (DeepEP) and return two."""


@dataclass(slots=True)
class Basis:
    """The model and trace that the inputs name. They are read once, even if other inputs change."""

    model: size.Model
    experts: Experts
    trace: TraceSummary | None
    costs: dict[tuple[object, ...], ModelCost]
    """Costs of the model. The key contains all values that they depend on."""


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
                f"{name} = {inputs.value(name)!r} (from {inputs.origin(name)}): it is about a trace, but the plan has "
                "none; give one with --trace FILE"
            )
    if inputs.traffic.trace:
        from kvtier.tools.plan.trace import read_trace  # noqa: PLC0415 - imports numpy and the trace readers

        trace = read_trace(Path(inputs.traffic.trace), inputs.traffic.trace_window_s, inputs.traffic.trace_time_unit)
    return Basis(found, Experts(*found.experts), trace, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class TierHardware:
    """One tier below GPU memory, on all hosts together."""

    name: str
    capacity_bytes: float
    """Bytes of the tier for KV."""
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One set of inputs, resolved at one size. All formulas start from it."""

    inputs: Inputs
    model: ModelCost
    workload: Workload
    basis: Basis
    replicas: int
    """Servers: copies of the model, each on `model.tp` GPUs; with data-parallel attention, every GPU is a server."""
    flops: float
    """FLOP/s that one server reaches in prefill, without attention."""
    attention_flops: float
    """FLOP/s that one server reaches in attention, in the format of the KV."""
    memory_bytes_per_s: float
    """Memory bandwidth that one server reaches in decoding."""
    launch_s: float
    """Shortest time of a step: all layers, one kernel after the other."""
    exchange_s: float
    """Time of the exchanges between a server's GPUs in a step, whatever the number of tokens."""
    token_exchange_s: float
    """Additional exchange time per token of the step."""
    load_bytes_per_s: float
    """Load bandwidth of one server in stored bytes. If ranks share a stored byte, it counts once."""
    weight_bytes: float
    """Weights of one copy of the model."""
    dense_bytes: float
    """Weights on one server that every decode step reads."""
    expert_bytes: float
    """Weights of routed experts on one server. A step reads the experts that its tokens use."""
    experts: Experts
    kv_bytes: float
    """GPU memory of one server for KV."""
    gpu_tokens: float
    """Tokens that fit into `kv_bytes`, in conversations of the workload's length."""
    batch: int
    """Requests that decode together when the server is full."""
    tiers: tuple[TierHardware, ...]
    """The tiers that have capacity, fastest first."""
    tier_curve: ReuseCurve
    """The workload's curve with snapshots of recurrent states, in stored bytes."""
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
    def gpu_stored_bytes(self) -> float:
        """Bytes that tiers would store for as many conversations as fill the KV memory of all servers."""
        tokens = self.workload.session_tokens
        return self.replicas * self.gpu_tokens / tokens * self.model.stored_bytes(tokens)

    @property
    def hosts(self) -> int:
        """Hosts that contain the GPUs."""
        return -(-self.inputs.gpu.count // self.inputs.host.gpus)

    @property
    def host_engines(self) -> int:
        """Engines that fit into a full host, at most all engines; 1 if an engine spans several hosts."""
        return min(self.replicas, max(self.inputs.host.gpus // self.server_gpus, 1))

    def step_weight_bytes(self, batch: float) -> float:
        """Return the bytes of weights that one server reads in a decode step of `batch` requests.

        Servers that share experts decode together, each with a batch of this size.
        """
        if not self.expert_bytes:
            return self.dense_bytes
        return self.dense_bytes + self.expert_bytes * self.experts.read_share(batch * (self.replicas // self.copies))

    def only(self, names: Collection[str]) -> "Deployment":
        """Return a copy with only the tiers in `names`. If `names` is empty, the copy has GPU memory alone."""
        return replace(self, tiers=tuple(it for it in self.tiers if it.name in names))


def resolve(inputs: Inputs, basis: Basis | None = None) -> Deployment:
    """Resolve the inputs at their size, or at the smallest size that holds the model if they have none.

    Args:
        inputs: from `kvtier.tools.plan.read_inputs`.
        basis: the model and trace that the inputs name, if already read.

    Raises:
        ConfigError: the model or a piece of hardware is unknown, or no size has room for the model and its longest
            conversation.
    """
    return next(deployments(inputs, basis))


def deployments(inputs: Inputs, basis: Basis | None = None) -> Iterator[Deployment]:
    """Yield the deployment at the size that the inputs give, or else at each size that holds the model, smallest first.

    A size divides the number of GPUs, or is a power of two, which may leave some GPUs idle. A size of more than one
    host takes whole hosts, or all GPUs. It is tried only if no smaller size holds the model.

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
            f"the longest prompt and its answer have {load.longest_tokens:,.0f} tokens, but {found.name} allows at "
            f"most {found.tokens_max:,}; use "
            + ("a trace of shorter prompts" if basis.trace else "fewer turns, a shorter history or shorter answers")
        )
    given, count = inputs.model.tp, inputs.gpu.count
    if count < given:
        origin = inputs.origin("gpu.count")
        raise ConfigError(f"gpu.count = {count} (from {origin}) is less than model.tp = {given}")
    experts = Experts(
        inputs.model.experts or basis.experts.routed, inputs.model.experts_per_token or basis.experts.used
    )
    refused, fits = "", False
    remedy: list[str] = []
    for tp, dp in _sizes(inputs, experts):
        if fits and tp > inputs.host.gpus:
            return
        sized = _completed(as_given, count // tp * tp, found)[0] if count % tp else inputs
        sized = sized if given else sized.change({"model.tp": tp, "model.dp_attention": dp}, SEARCHED)
        sized, exchange = _with_exchange(sized)
        try:
            model = _model_cost(sized, basis)
        except ConfigError:
            if given or tp == 1:  # some numbers of ranks cannot share the heads, but one rank always can
                raise
            continue
        deployment = _deployment(sized, model, load, experts, basis, (*sources, *exchange))
        why = _does_not_fit(deployment, named=bool(given))
        if not why:
            fits = True
            yield deployment
        elif not (dp and refused):  # data-parallel attention needs more memory per GPU
            refused, remedy = why, _remedy(deployment, named=bool(given))
    if not fits:
        remedy[1:1] = _more_gpus(as_given, load, experts, basis)
        raise ConfigError(f"{refused}; use {', or '.join(remedy)}")


def _more_gpus(as_given: Inputs, load: Workload, experts: Experts, basis: Basis) -> list[str]:
    """Name the fewest GPUs, within one host or in whole hosts, that hold the model. Name none if the size is given."""
    host = as_given.host.gpus
    if as_given.model.tp:
        return []
    for count in (*range(1, host), *range(host, TP_MAX + 1, host)):
        inputs = _completed(as_given.change({"gpu.count": count}), count, basis.model)[0]
        for tp, dp in _sizes(inputs, experts):
            if tp == count:
                sized = _with_exchange(inputs.change({"model.tp": tp, "model.dp_attention": dp}, SEARCHED))[0]
                try:
                    found = _deployment(sized, _model_cost(sized, basis), load, experts, basis, ())
                except ConfigError:  # this number of ranks cannot share the heads
                    continue
                if not _does_not_fit(found, named=False):
                    far = " in engines of several nodes, which kvtier refuses" if count > host else ""
                    return [f"at least {count} GPUs (--gpu){far}"]
    return []


def _sizes(inputs: Inputs, experts: Experts) -> Iterator[tuple[int, bool]]:
    """Yield the size of each deployment to try, and whether its attention is data-parallel.

    Data-parallel attention requires experts that GPUs can share.
    """
    given, count = inputs.model.tp, inputs.gpu.count
    if given:
        yield given, inputs.model.dp_attention
        return
    found = (it for it in range(1, min(count, TP_MAX) + 1) if count % it == 0 or it.bit_count() == 1)
    sizes = (it for it in found if it < inputs.host.gpus or it % inputs.host.gpus == 0 or it == count)
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
    if inputs.model.dp_attention:  # each GPU has its part of the experts and all other weights
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
        tier_curve=load.stored_curve.stored(model.token_bytes, software.snapshots * model.state_bytes),
        sources=sources,
    )


def _step_times(inputs: Inputs, experts: Experts, model: size.Model) -> tuple[float, float, float]:
    """Return three times in seconds: launches and exchanges of a step, and the additional exchange per token.

    GPUs that split each layer sum the results of its attention and of its MLP, with one all-reduce each (Shoeybi et
    al., "Megatron-LM", 2019, section 3). GPUs that share only the experts send tokens to the experts and back (DeepEP,
    2025). Between hosts, each GPU uses its own network adapter. It sends its part of a sum, or one copy of a token to
    each host.
    """
    gpu, tp, layers = inputs.gpu, inputs.model.tp, float(len(model.layers))
    if () in model.layers:  # an MLP is a separate layer, so two layers count as one
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
        basis.costs[key] = model_cost(size.of(basis.model, dtype=dtype, tp=tp, chunk_tokens=chunk_tokens), copies)
    return basis.costs[key]


def _does_not_fit(deployment: Deployment, *, named: bool) -> str:
    """Explain why the GPUs cannot hold the model and its longest conversation; empty if they can."""
    inputs, load, gpus = deployment.inputs, deployment.workload, deployment.server_gpus
    needed = deployment.model.gpu_bytes(max(load.longest_tokens, load.session_tokens))
    if deployment.kv_bytes >= needed:
        return ""
    size = f"model.tp = {inputs.model.tp} (from {inputs.origin('model.tp')}): " if named else ""
    return (
        f"{size}{gpus} x {inputs.gpu.name} leave "
        f"{max(deployment.kv_bytes, 0) / 1e9:.1f} GB for KV next to "
        f"{(deployment.dense_bytes + deployment.expert_bytes) / 1e9:.1f} GB of weights in {inputs.model.weights}, "
        f"but the longest session needs {needed / 1e9:.1f} GB"
    )


def _remedy(deployment: Deployment, *, named: bool) -> list[str]:
    """Name the options that make room for the model and its longest conversation."""
    inputs, options = deployment.inputs, ["larger GPUs (--gpu)"]
    gpu, weight, most = inputs.gpu, WEIGHT_BYTES[inputs.model.weights], max(inputs.host.gpus, inputs.gpu.count)
    room_each = (gpu.memory_bytes * gpu.memory_share - gpu.other_bytes) / deployment.weight_bytes
    room, room_now = most * room_each, (inputs.model.tp if named else inputs.gpu.count) * room_each
    if named and inputs.model.tp < inputs.host.gpus:
        options.append("a larger --tp")
    smaller = [it for it, size in WEIGHT_BYTES.items() if size < weight and size < weight * room]
    more = "a larger --tp" if named else f"up to {most} GPUs"
    for beside, fits in (("", True), (f" with {more}", False)):
        formats = [it for it in smaller if (WEIGHT_BYTES[it] < weight * room_now) == fits]
        options += [f"--weights {' or '.join(formats)}{beside}"] if formats else []
    if deployment.kv_bytes > 0:
        options.append("shorter conversations (--history, --turns) or a smaller --dtype")
    return options


def _completed(inputs: Inputs, used_gpus: int, found: size.Model) -> tuple[Inputs, tuple[tuple[str, str, str], ...]]:
    """Add totals of all hosts, the catalogue's hardware and the model's parameters. Return inputs and sources."""
    return _with_hardware(_with_parameters(_with_hosts(inputs, used_gpus), found))


def _with_hosts(inputs: Inputs, used_gpus: int) -> Inputs:
    """Multiply totals for one host by the number of hosts that `used_gpus` need. Idle hosts serve no copy.

    Defaults and the figures of a probe are for one host. A total that the user gives stays unchanged.
    """
    hosts = -(-used_gpus // inputs.host.gpus)
    values: dict[str, object] = {
        name: hosts * inputs.value(name)  # type: ignore[operator]
        for name in _PER_HOST
        if inputs.origins.get(name, "probe").startswith("probe")
    }
    inputs = inputs.change(values, f"default, for {hosts} hosts") if hosts > 1 else inputs
    gpus = inputs.gpu.count
    if gpus > inputs.host.gpus:  # several hosts are whole ones; a single host may be a smaller server
        gpus = -(-gpus // inputs.host.gpus) * inputs.host.gpus
    if "power.server_watts" in inputs.origins or gpus == _SERVER_GPUS:
        return inputs
    watts = inputs.power.server_watts * gpus / _SERVER_GPUS
    return inputs.change({"power.server_watts": watts}, f"default, for servers of {gpus} GPUs")


def given_totals(inputs: Inputs) -> list[str]:
    """List the totals of host memory and drives that the inputs give. Totals that are not given grow with the hosts."""
    names = ("host.capacity_bytes", "disk.count")
    return [it for it in names if not inputs.origin(it).startswith(("default", "probe")) and inputs.value(it)]


def of_each_host(inputs: Inputs, hosts: int) -> Inputs:
    """Return the inputs with the given totals divided by `hosts`, as figures of one host, which grow with the hosts."""
    totals = {name: inputs.value(name) for name in given_totals(inputs)}
    return inputs.change({name: -(-total // hosts) for name, total in totals.items()}, "probe, of one host")  # type: ignore[operator]


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
            read_bytes_per_s=shared.read_bytes_per_s or network_rate,
            write_bytes_per_s=shared.write_bytes_per_s or network_rate,
        ),
    )
    return tuple(tier for tier in tiers if tier.capacity_bytes)


def _with_hardware(inputs: Inputs) -> tuple[Inputs, tuple[tuple[str, str, str], ...]]:
    """Add missing hardware figures from the catalogue. Return the inputs and the entries used."""
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
        if kind != "exchange" and used[section] and missing:  # figures of an exchange depend on the size
            item = find(kind, str(inputs.value(named_by)), inputs.origin(named_by))
            values = {f"{section}.{key}": _catalogue_value(inputs, item, key) for key in missing}
            inputs = inputs.change(values, f"catalogue {item.name}")
            sources.append((item.name, item.source, item.date))
    return inputs, tuple(sources)


def _with_exchange(inputs: Inputs) -> tuple[Inputs, tuple[tuple[str, str, str], ...]]:
    """Add the figures of the exchange among the GPUs of a copy. Return the inputs and the source."""
    found = {"exchange_latency_s": "latency_s", "exchange_bytes_per_s": "bytes_per_s", "dispatch_s": "dispatch_s"}
    missing = {name: key for name, key in found.items() if not inputs.value(f"gpu.{name}")}
    if inputs.model.tp == 1 or not missing:
        return inputs, ()
    item = find("exchange", inputs.gpu.exchange, inputs.origin("gpu.exchange"))
    values = {f"gpu.{name}": _of_size(item.values[key], inputs.model.tp) for name, key in missing.items()}
    return inputs.change(values, f"catalogue {item.name}"), ((item.name, item.source, item.date),)


def _of_size(figure: float | dict[str, float], tp: int) -> float:
    """Return `figure`, or its value for `tp` GPUs if it depends on their number.

    A number that was not measured has the value of the next larger one that was, or of the largest.
    """
    if not isinstance(figure, dict):
        return figure
    return figure[min((it for it in figure if int(it) >= tp), default=max(figure, key=int), key=int)]


def _catalogue_value(inputs: Inputs, item: HardwareItem, key: str) -> float | str:
    value = item.values["flops" if key == "attention_flops" else key]
    if key == "attention_flops":
        # KV of fewer than eight bits is widened before it is multiplied.
        return float(value.get("fp8" if inputs.model.kv_dtype.startswith("fp8") else "bf16", value["bf16"]))
    if key == "flops":
        # Four-bit weights count at the eight-bit rate, because kernels widen them or prefill is not faster.
        # A GPU without an eight-bit rate widens such weights to sixteen bits (Marlin).
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
