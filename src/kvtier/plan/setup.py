"""The inputs made definite: nothing is "from the catalogue" any more, and the figures that all formulas share."""

from dataclasses import dataclass

from kvtier import size
from kvtier.errors import ConfigError
from kvtier.plan.catalogue import Item, find
from kvtier.plan.demand import Demand, demand_of, trace_of
from kvtier.plan.inputs import Inputs
from kvtier.plan.shape import WEIGHT_BYTES, Shape, shape_of
from kvtier.plan.trace import TraceSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where KV can be, below the GPU."""

    name: str
    capacity_bytes: float
    """That KV may fill, of all hosts together."""
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One set of inputs, resolved; all formulas start here."""

    inputs: Inputs
    shape: Shape
    demand: Demand
    trace: TraceSummary | None
    replicas: int
    """Copies of the model, each on `model.tp` GPUs."""
    flops: float
    """FLOP/s that one replica reaches in prefill."""
    memory_bytes_per_s: float
    """That one replica reaches in decoding."""
    load_bytes_per_s: float
    """Load stream of one replica."""
    weight_bytes: float
    kv_bytes: float
    """GPU memory left for KV, of one replica."""
    gpu_tokens: float
    """Tokens of sessions as long as the demand's that fit in it."""
    batch: int
    """Requests that decode together when the GPU is full."""
    places: tuple[Place, ...]
    """Fastest first; those that hold nothing are left out."""
    sources: tuple[tuple[str, str, str], ...]
    """Name, source and date of each catalogue entry that was used."""


def set_up(inputs: Inputs, trace: TraceSummary | None = None) -> Setup:
    """Resolve the inputs.

    Args:
        inputs: as they were given.
        trace: what the trace says that they name, where it has been read already.

    Raises:
        ConfigError: an unknown model or part, GPUs that cannot hold the model, a prompt that no replica can hold.
    """
    model = size.model(inputs.model.name)
    kv = size.of(model, dtype=inputs.model.kv_dtype, tp=inputs.model.tp, chunk_tokens=inputs.software.chunk_tokens)
    inputs, sources = _resolve(inputs, model)
    shape = shape_of(kv)
    trace = trace or trace_of(inputs)
    demand = demand_of(inputs, trace)
    gpu, tp = inputs.gpu, inputs.model.tp
    if gpu.count % tp:
        raise ConfigError(
            f"gpu.count = {gpu.count} (from {inputs.origin('gpu.count')}): not a multiple of model.tp = {tp}"
        )
    weight_bytes = inputs.model.parameters * WEIGHT_BYTES[inputs.model.weights]
    kv_bytes = tp * (gpu.memory_bytes * gpu.memory_share - gpu.other_bytes) - weight_bytes
    session_bytes = shape.gpu_bytes(demand.session_tokens)
    if kv_bytes < session_bytes:
        raise ConfigError(
            f"model.tp = {tp} (from {inputs.origin('model.tp')}): {tp} x {gpu.name} leave {max(kv_bytes, 0) / 1e9:.1f} "
            f"GB for KV beside {weight_bytes / 1e9:.1f} GB of weights, one session needs {session_bytes / 1e9:.1f} GB; "
            "allowed: more or larger GPUs, smaller weights or a smaller kv_dtype"
        )
    longest = demand.session_tokens
    if shape.tokens_max is not None and longest > shape.tokens_max:
        raise ConfigError(f"prompts of {longest:,.0f} tokens: {shape.name} allows at most {shape.tokens_max:,}")
    software = inputs.software
    return Setup(
        inputs=inputs,
        shape=shape,
        demand=demand,
        trace=trace,
        replicas=gpu.count // tp,
        flops=tp * gpu.flops * gpu.flops_share,
        memory_bytes_per_s=tp * gpu.memory_bytes_per_s * gpu.memory_rate_share,
        load_bytes_per_s=tp * (software.load_bytes_per_s or gpu.link_bytes_per_s * software.link_share),
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        gpu_tokens=kv_bytes / session_bytes * demand.session_tokens,
        batch=min(gpu.batch_max, int(kv_bytes / session_bytes)),
        places=tuple(_places(inputs)),
        sources=sources,
    )


def _places(inputs: Inputs) -> list[Place]:
    host, disk, shared = inputs.host, inputs.disk, inputs.shared
    host_rate = host.channels * host.channel_bytes_per_s * host.share
    network_rate = shared.adapters * shared.adapter_bytes_per_s
    places = [
        Place(
            name="host",
            capacity_bytes=host.capacity_bytes,
            read_bytes_per_s=host_rate,
            write_bytes_per_s=host_rate,
        ),
        Place(
            name="disk",
            capacity_bytes=disk.count * disk.capacity_bytes * disk.filled,
            read_bytes_per_s=disk.count * disk.read_bytes_per_s,
            write_bytes_per_s=disk.count * disk.write_bytes_per_s,
        ),
        Place(
            name="shared",
            capacity_bytes=shared.capacity_bytes,
            read_bytes_per_s=network_rate,
            write_bytes_per_s=network_rate,
        ),
    ]
    return [it for it in places if it.capacity_bytes]


def _resolve(inputs: Inputs, model: size.Model) -> tuple[Inputs, tuple[tuple[str, str, str], ...]]:
    """The inputs with every 0 that means "from elsewhere" replaced, each with its origin."""
    wanted = [("gpu", "gpu", inputs.gpu.name, inputs.origin("gpu.name"))]
    if inputs.disk.count:
        wanted.append(("disk", "drive", inputs.disk.name, inputs.origin("disk.name")))
    if inputs.host.capacity_bytes:
        wanted.append(("host", "memory", inputs.host.memory, inputs.origin("host.memory")))
    if inputs.shared.capacity_bytes:
        wanted.append(("shared", "network", inputs.shared.network, inputs.origin("shared.network")))
    sources: list[tuple[str, str, str]] = []
    for section, kind, name, origin in wanted:
        if all(inputs.value(it) for it in _filled_by(section)):
            continue  # an item that the catalogue lacks, with all its figures given
        item = find(kind, name, origin)
        inputs = _filled(inputs, section, item)
        sources.append((item.name, item.source, item.date))
    return _with_parameters(inputs, model), tuple(sources)


def _filled_by(section: str) -> list[str]:
    keys = {
        "gpu": ("flops", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "watts"),
        "disk": ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s", "drive_writes_per_day", "watts"),
        "host": ("channel_bytes_per_s",),
        "shared": ("adapter_bytes_per_s",),
    }
    return [f"{section}.{key}" for key in keys[section]]


def _filled(inputs: Inputs, section: str, item: Item) -> Inputs:
    values: dict[str, object] = {}
    for name in _filled_by(section):
        if inputs.value(name):
            continue
        value = item.values[name.partition(".")[2]]
        if name == "gpu.flops":
            # Weights of four bits are counted at the rate of eight: their kernels widen them, or prefill is not faster.
            rate = "bf16" if inputs.model.weights == "bf16" else "fp8"
            if rate not in value:
                origin = inputs.origin("model.weights")
                raise ConfigError(
                    f"model.weights = {inputs.model.weights} (from {origin}): {item.name} computes in "
                    f"{' and '.join(value)} only; allowed: these, or gpu.flops"
                )
            value = value[rate]
        values[name] = int(value) if name.endswith((".memory_bytes", ".capacity_bytes")) else float(value)
    return inputs.change(values, f"catalogue {item.name}")


def _with_parameters(inputs: Inputs, model: size.Model) -> Inputs:
    values: dict[str, object] = {}
    if not inputs.model.parameters:
        if model.parameters_billion is None:
            raise ConfigError(
                f"model {model.name}: the number of its parameters is not known; set model.parameters and "
                "model.active_parameters"
            )
        values["model.parameters"] = model.parameters_billion * 1e9
    if not inputs.model.active_parameters:
        active = model.active_billion or model.parameters_billion
        values["model.active_parameters"] = active * 1e9 if active else inputs.model.parameters
    return inputs.change(values, f"model {model.name}")
