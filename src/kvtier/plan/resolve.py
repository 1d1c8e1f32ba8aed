"""Inputs resolved to a deployment: missing values from the catalogue and the model, and what all formulas share."""

import math
from dataclasses import dataclass
from pathlib import Path

from kvtier import size
from kvtier.errors import ConfigError
from kvtier.plan.hardware import KINDS, HardwareItem, find
from kvtier.plan.inputs import Inputs
from kvtier.plan.model_cost import ModelCost, model_cost
from kvtier.plan.workload import ReuseCurve, TraceSummary, Workload, workload
from kvtier.size.capacity import WEIGHT_BYTES
from kvtier.size.sizes import TP_MAX

FEWEST = "the fewest that hold the model"
"""Origin of a `model.tp` that is not given."""
_FROM_CATALOGUE = {
    "gpu": ("flops", "attention_flops", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "watts"),
    "disk": ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s", "drive_writes_per_day", "watts"),
    "host": ("channel_bytes_per_s",),
    "shared": ("adapter_bytes_per_s",),
}
"""Inputs of each section that the catalogue has."""


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
    """One set of inputs, resolved; all formulas start here."""

    inputs: Inputs
    model: ModelCost
    workload: Workload
    trace: TraceSummary | None
    replicas: int
    """Copies of the model, each on `model.tp` GPUs."""
    flops: float
    """FLOP/s that one replica reaches in prefill, with the weights."""
    attention_flops: float
    """The same in attention, in the format of the KV."""
    memory_bytes_per_s: float
    """Bandwidth that one replica reaches in decoding."""
    load_bytes_per_s: float
    """Load bandwidth of one replica, in stored bytes."""
    weight_bytes: float
    kv_bytes: float
    """GPU memory for KV, of one replica."""
    gpu_tokens: float
    """Tokens that fit in it, in sessions of the workload's length."""
    batch: int
    """Requests that decode together when the GPU is full."""
    tiers: tuple[TierHardware, ...]
    """Fastest first, without those of no capacity."""
    tier_curve: ReuseCurve
    """The workload's curve with snapshots of recurrent states, in tokens of equal size."""
    sources: tuple[tuple[str, str, str], ...]
    """Name, source and date of each catalogue entry used."""


def resolve(inputs: Inputs, trace: TraceSummary | None = None) -> Deployment:
    """Resolve the inputs.

    Args:
        inputs: from `kvtier.plan.read_inputs`.
        trace: summary of the trace that the inputs name, if it has been read already.

    Raises:
        ConfigError: an unknown model or part, GPUs that cannot hold the model, a prompt that no replica can hold.
    """
    found = size.model(inputs.model.name)
    inputs, sources = _with_hardware(inputs)
    inputs = _with_parameters(inputs, found)
    if trace is None and inputs.traffic.trace:
        from kvtier.plan.trace import read_trace  # noqa: PLC0415 - imports numpy and the trace readers

        trace = read_trace(Path(inputs.traffic.trace), inputs.traffic.trace_window_s)
    load = workload(inputs, trace)
    if found.tokens_max is not None and load.longest_tokens > found.tokens_max:
        raise ConfigError(
            f"the longest prompt and its answer have {load.longest_tokens:,.0f} tokens: {found.name} allows at most "
            f"{found.tokens_max:,}; allowed: fewer turns, a shorter history or shorter answers"
        )
    inputs, model = _with_ranks(inputs, found, load)
    gpu, tp, software = inputs.gpu, inputs.model.tp, inputs.software
    weight_bytes = _weight_bytes(inputs)
    kv_bytes = _kv_bytes(inputs, tp)
    session_bytes = model.gpu_bytes(load.session_tokens)
    stream = min(software.load_bytes_per_s or math.inf, gpu.link_bytes_per_s * software.link_share)
    return Deployment(
        inputs=inputs,
        model=model,
        workload=load,
        trace=trace,
        replicas=gpu.count // tp,
        flops=tp * gpu.flops * gpu.flops_share,
        attention_flops=tp * gpu.attention_flops * gpu.flops_share,
        memory_bytes_per_s=tp * gpu.memory_bytes_per_s * gpu.memory_rate_share,
        load_bytes_per_s=tp * stream / model.delivered_ratio,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        gpu_tokens=kv_bytes / session_bytes * load.session_tokens,
        batch=min(gpu.batch_max, int(kv_bytes / session_bytes)),
        tiers=_tiers(inputs),
        tier_curve=load.curve.with_snapshots(software.snapshots * model.state_bytes / model.token_bytes),
        sources=sources,
    )


def _with_ranks(inputs: Inputs, found: size.Model, load: Workload) -> tuple[Inputs, ModelCost]:
    """The inputs with `model.tp`, where it is not given the fewest GPUs that hold the model, and the model's costs."""
    given, count = inputs.model.tp, inputs.gpu.count
    if given and count % given:
        origin = inputs.origin("gpu.count")
        raise ConfigError(f"gpu.count = {count} (from {origin}): not a multiple of model.tp = {given}")
    refused = ""
    for tp in [given] if given else [it for it in range(1, min(count, TP_MAX) + 1) if count % it == 0]:
        try:
            model = _model_cost(inputs, found, tp)
        except ConfigError:
            if given or tp == 1:  # some numbers of ranks cannot share the heads; one can, unless the model is refused
                raise
            continue
        refused = _does_not_fit(inputs, model, load, tp)
        if not refused:
            return inputs if given else inputs.change({"model.tp": tp}, FEWEST), model
    raise ConfigError(f"{refused}; allowed: more or larger GPUs, smaller weights or a smaller kv_dtype")


def _model_cost(inputs: Inputs, found: size.Model, tp: int) -> ModelCost:
    kv = size.of(found, dtype=inputs.model.kv_dtype, tp=tp, chunk_tokens=inputs.software.chunk_tokens)
    if not kv.bytes_per_token:
        raise ConfigError(
            f"model {found.name}: it keeps no KV that grows with its tokens, so there is nothing for tiers to hold; "
            "allowed: models with attention layers"
        )
    return model_cost(kv, inputs.software.copies)


def _weight_bytes(inputs: Inputs) -> float:
    return inputs.model.parameters * WEIGHT_BYTES[inputs.model.weights]


def _kv_bytes(inputs: Inputs, tp: int) -> float:
    gpu = inputs.gpu
    return tp * (gpu.memory_bytes * gpu.memory_share - gpu.other_bytes) - _weight_bytes(inputs)


def _does_not_fit(inputs: Inputs, model: ModelCost, load: Workload, tp: int) -> str:
    """Why `tp` GPUs cannot hold the model and its longest session; empty where they can."""
    left, needed = _kv_bytes(inputs, tp), model.gpu_bytes(max(load.longest_tokens, load.session_tokens))
    if left >= needed:
        return ""
    origin = f" (from {inputs.origin('model.tp')})" if inputs.model.tp else ""
    return (
        f"model.tp = {tp}{origin}: {tp} x {inputs.gpu.name} leave {max(left, 0) / 1e9:.1f} GB for KV next to "
        f"{_weight_bytes(inputs) / 1e9:.1f} GB of weights, the longest session needs {needed / 1e9:.1f} GB"
    )


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
        if missing == ["attention_flops"]:  # a GPU that is not in the catalogue
            inputs = inputs.change({"gpu.attention_flops": inputs.gpu.flops}, "gpu.flops")
            continue
        if used[section] and missing:
            item = find(kind, str(inputs.value(named_by)), inputs.origin(named_by))
            values = {f"{section}.{key}": _catalogue_value(inputs, item, key) for key in missing}
            inputs = inputs.change(values, f"catalogue {item.name}")
            sources.append((item.name, item.source, item.date))
    return inputs, tuple(sources)


def _catalogue_value(inputs: Inputs, item: HardwareItem, key: str) -> float:
    value = item.values["flops" if key == "attention_flops" else key]
    if key == "attention_flops":
        # KV of fewer bits than eight is widened before it is multiplied.
        return float(value.get("fp8" if inputs.model.kv_dtype.startswith("fp8") else "bf16", value["bf16"]))
    if key == "flops":
        # Weights of four bits are counted at the rate of eight: their kernels widen them, or prefill is not faster.
        weights = inputs.model.weights
        rate = "bf16" if weights == "bf16" else "fp8"
        if rate not in value:
            raise ConfigError(
                f"model.weights = {weights} (from {inputs.origin('model.weights')}): {item.name} computes in "
                f"{' and '.join(value)} only; allowed: these, or gpu.flops"
            )
        value = value[rate]
    return int(value) if key in {"memory_bytes", "capacity_bytes"} else float(value)


def _with_parameters(inputs: Inputs, model: size.Model) -> Inputs:
    values: dict[str, object] = {}
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
