"""Inputs resolved to a deployment: missing values from the catalogue and the model, and what all formulas share."""

from dataclasses import dataclass
from pathlib import Path

from kvtier import size
from kvtier.errors import ConfigError
from kvtier.plan.hardware import KINDS, HardwareItem, find
from kvtier.plan.inputs import Inputs
from kvtier.plan.model_cost import WEIGHT_BYTES, ModelCost, model_cost
from kvtier.plan.workload import TraceSummary, Workload, workload

_FROM_CATALOGUE = {
    "gpu": ("flops", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "watts"),
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
    """FLOP/s that one replica reaches in prefill."""
    memory_bytes_per_s: float
    """Bandwidth that one replica reaches in decoding."""
    load_bytes_per_s: float
    """Load bandwidth of one replica."""
    weight_bytes: float
    kv_bytes: float
    """GPU memory for KV, of one replica."""
    gpu_tokens: float
    """Tokens that fit in it, in sessions of the workload's length."""
    batch: int
    """Requests that decode together when the GPU is full."""
    tiers: tuple[TierHardware, ...]
    """Fastest first, without those of no capacity."""
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
    kv = size.of(found, dtype=inputs.model.kv_dtype, tp=inputs.model.tp, chunk_tokens=inputs.software.chunk_tokens)
    inputs, sources = _with_hardware(inputs)
    inputs = _with_parameters(inputs, found)
    model = model_cost(kv)
    if trace is None and inputs.traffic.trace:
        from kvtier.plan.trace import read_trace  # noqa: PLC0415 - imports numpy and the trace readers

        trace = read_trace(Path(inputs.traffic.trace), inputs.traffic.trace_window_s)
    load = workload(inputs, trace)
    gpu, tp, software = inputs.gpu, inputs.model.tp, inputs.software
    if gpu.count % tp:
        raise ConfigError(
            f"gpu.count = {gpu.count} (from {inputs.origin('gpu.count')}): not a multiple of model.tp = {tp}"
        )
    weight_bytes = inputs.model.parameters * WEIGHT_BYTES[inputs.model.weights]
    kv_bytes = tp * (gpu.memory_bytes * gpu.memory_share - gpu.other_bytes) - weight_bytes
    session_bytes = model.gpu_bytes(load.session_tokens)
    if kv_bytes < session_bytes:
        raise ConfigError(
            f"model.tp = {tp} (from {inputs.origin('model.tp')}): {tp} x {gpu.name} leave {max(kv_bytes, 0) / 1e9:.1f} "
            f"GB for KV next to {weight_bytes / 1e9:.1f} GB of weights, one session needs {session_bytes / 1e9:.1f} "
            "GB; allowed: more or larger GPUs, smaller weights or a smaller kv_dtype"
        )
    if model.tokens_max is not None and load.session_tokens > model.tokens_max:
        raise ConfigError(
            f"prompts of {load.session_tokens:,.0f} tokens: {model.name} allows at most {model.tokens_max:,}"
        )
    return Deployment(
        inputs=inputs,
        model=model,
        workload=load,
        trace=trace,
        replicas=gpu.count // tp,
        flops=tp * gpu.flops * gpu.flops_share,
        memory_bytes_per_s=tp * gpu.memory_bytes_per_s * gpu.memory_rate_share,
        load_bytes_per_s=tp * (software.load_bytes_per_s or gpu.link_bytes_per_s * software.link_share),
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        gpu_tokens=kv_bytes / session_bytes * load.session_tokens,
        batch=min(gpu.batch_max, int(kv_bytes / session_bytes)),
        tiers=_tiers(inputs),
        sources=sources,
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
        if used[section] and missing:
            item = find(kind, str(inputs.value(named_by)), inputs.origin(named_by))
            values = {f"{section}.{key}": _catalogue_value(inputs, item, key) for key in missing}
            inputs = inputs.change(values, f"catalogue {item.name}")
            sources.append((item.name, item.source, item.date))
    return inputs, tuple(sources)


def _catalogue_value(inputs: Inputs, item: HardwareItem, key: str) -> float:
    value = item.values[key]
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
