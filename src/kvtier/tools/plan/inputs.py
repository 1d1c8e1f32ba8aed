"""The inputs of a plan, each with its section, default, allowed values, meaning, and the source of the default.

To add an input, add a line here. The file reader, `--set`, the list of assumptions, messages and sensitivities then
include it. If the line says so, the value 0 stands for "from the catalogue", "from the model" or "not given".
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Literal

from kvtier.config.schema import Setting, SettingsSection, setting, settings
from kvtier.config.value_types import (
    ChoiceKind,
    Count,
    Seconds,
    Size,
    Switch,
    Text,
    parse_number,
    parse_size,
    within,
)
from kvtier.errors import ConfigError
from kvtier.report.format import bytes_text, power_text
from kvtier.tools.size.sizes import GPU_MEMORY_SHARE, GPU_OTHER_BYTES

_NAME = Text(most=400)
"""A name, or a path."""
_CATALOGUE = "from the catalogue"
_TOKENS = Count(0, 10**8)


@dataclass(frozen=True, slots=True)
class Number:
    """A kind of input: a number from `least` to `most`, in text also ``6.98e9`` or ``128k``."""

    least: float
    most: float

    @property
    def allowed(self) -> str:
        """The allowed range, in words."""
        return f"a number from {self.least:g} to {self.most:g}"

    def read(self, raw: object, *, is_text: bool) -> float:
        """Read a number. With `is_text`, it may be a string."""
        if is_text and isinstance(raw, str):
            try:
                raw = float(raw)
            except ValueError:
                raw = float(parse_number(raw))
        if not isinstance(raw, int | float) or isinstance(raw, bool) or not math.isfinite(raw):
            raise ValueError("not a number")
        return float(within(raw, self.least, self.most))

    def show(self, value: object) -> str:
        """Return the number as text."""
        return power_text(value) if isinstance(value, int | float) else str(value)


@dataclass(frozen=True, slots=True)
class RoundSize(Size):
    """A number of bytes, shown in binary units if it is a multiple of 1 MiB, as for memory, or else in decimal ones."""

    def show(self, value: object) -> str:
        """Return the size with its unit, or ``none`` for 0."""
        text = bytes_text(value) if isinstance(value, int) and value % 2**20 else Size.show(self, value)
        return text if value else "none"


@dataclass(frozen=True, slots=True)
class Rate(Number):
    """Bytes per second: a number, or a size such as ``14.5 GB/s``."""

    least: float = 1e6
    most: float = 1e16

    @property
    def allowed(self) -> str:
        """The allowed range and forms, in words."""
        span = f"{bytes_text(self.least)}/s to {bytes_text(self.most)}/s"
        return f"bytes a second as a number, or a size such as 14.5 GB/s; from {span}"

    def read(self, raw: object, *, is_text: bool) -> float:
        """Read a rate: a number, or a string such as ``14.5 GB/s``, in which ``/s`` is optional."""
        if isinstance(raw, str):
            text = raw.strip().removesuffix("/s")
            try:
                raw = float(text)
            except ValueError:
                raw = parse_size(text)
        return Number.read(self, raw, is_text=is_text)

    def show(self, value: object) -> str:
        """Return the rate with its unit."""
        return f"{bytes_text(value)}/s" if isinstance(value, int | float) else str(value)


@cache
def _from_zero(kind: Count | Number | Seconds | Size) -> Count | Number | Seconds | Size:
    """Return a copy of `kind` that allows values from 0."""
    return replace(kind, least=0)


@dataclass(frozen=True, slots=True)
class Or:
    """A kind that also allows one special value: 0, or None, which text writes as ``auto``."""

    kind: Count | Number | Seconds | Size
    means: str
    value: int | None = 0

    @property
    def allowed(self) -> str:
        """The allowed values of the kind, and the special value, in words."""
        return f"{self.kind.allowed}; {'auto' if self.value is None else 0}: {self.means}"

    def read(self, raw: object, *, is_text: bool) -> object:
        """Read the special value, or a value of the kind."""
        if self.value is None:
            return None if raw is None or raw == "auto" else self.kind.read(raw, is_text=is_text)
        with suppress(ValueError):
            if not (zero := _from_zero(self.kind).read(raw, is_text=is_text)):
                return zero
        return self.kind.read(raw, is_text=is_text)

    def show(self, value: object) -> str:
        """Return `means` if `value` is the special value; otherwise return `value` as the kind shows it."""
        return self.means if value == self.value else self.kind.show(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs(SettingsSection):
    """The model and its formats."""

    section: ClassVar[str] = "model"

    name: str = setting("", _NAME, "The model.")
    ignore: str = setting("", _NAME, "Fields of its config.json to ignore, separated by commas.")
    kv_dtype: str = setting("bf16", _NAME, "Format of the KV.")
    weights: Literal["auto", "bf16", "fp8", "fp4"] = setting(
        "auto", ChoiceKind(("auto", "bf16", "fp8", "fp4")), "Format of the weights; auto: as the checkpoint ships."
    )
    tp: int = setting(
        0,
        Or(Count(0, 1024), "the smallest size that serves most users, found for each arm"),
        "GPUs that share one copy of the model (tensor-parallel size).",
    )
    dp_attention: bool = setting(
        default=False,
        kind=Switch(),
        help="Those GPUs share the experts only: each computes the attention of its own requests, with its own KV.",
    )
    parameters: float = setting(
        0.0, Or(Number(1e6, 1e14), "from the model"), "All parameters: they fill GPU memory, and decoding reads them."
    )
    active_parameters: float = setting(
        0.0, Or(Number(1e6, 1e14), "from the model"), "Parameters multiplied with each prompt token."
    )
    experts: int = setting(
        0,
        Or(Count(0, 10**5), "from the model; where unknown, a decode step reads all weights"),
        "Routed experts of a layer; 1: no mixture of experts.",
    )
    experts_per_token: int = setting(
        0, Or(Count(0, 10**5), "from the model"), "Routed experts that one token uses in a layer."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInputs(SettingsSection):
    """The GPUs, and the shares of their data sheet's figures that an engine reaches."""

    section: ClassVar[str] = "gpu"

    name: str = setting("h100-sxm", _NAME, "The kind of GPU.")
    count: int = setting(8, Count(1, 10**6), "GPUs.")
    flops: float = setting(
        0.0, Or(Number(1e9, 1e18), _CATALOGUE), "Peak FLOP/s of one GPU, dense, in the weights' format."
    )
    attention_flops: float = setting(
        0.0, Or(Number(1e9, 1e18), _CATALOGUE), "Peak FLOP/s of one GPU for attention, in the format of the KV."
    )
    memory_bytes: int = setting(0, Or(RoundSize(0, 2**50), _CATALOGUE), "Memory of one GPU.")
    memory_bytes_per_s: float = setting(0.0, Or(Rate(), _CATALOGUE), "Bandwidth of that memory.")
    link_bytes_per_s: float = setting(0.0, Or(Rate(), _CATALOGUE), "Link of one GPU to its host, one direction.")
    exchange: str = setting("", _NAME, "Link over which GPUs that share a layer exchange; empty: from the catalogue.")
    exchange_latency_s: float = setting(
        0.0, Or(Number(1e-12, 1), _CATALOGUE), "Seconds of an all-reduce of a few bytes, among the GPUs of a copy."
    )
    exchange_bytes_per_s: float = setting(
        0.0, Or(Rate(), _CATALOGUE), "Rate at which one of those GPUs sends in an all-reduce."
    )
    dispatch_s: float = setting(
        0.0, Or(Number(1e-12, 1), _CATALOGUE), "Seconds to send one token to its experts and back, with dp_attention."
    )
    exchange_wait_s: float = setting(
        8e-6,
        Number(0, 1),
        "Seconds of every exchange in a step in which GPUs wait for the slowest of them.",
        "calibrated: docs/planning.md",
    )
    layer_s: float = setting(
        40e-6,
        Number(0, 1),
        "Least seconds of a layer in a step at any batch size, because kernels start one after another.",
        "calibrated: docs/planning.md",
    )
    expert_layer_s: float = setting(
        25e-6, Number(0, 1), "Least seconds that the routed experts of a layer add.", "calibrated: docs/planning.md"
    )
    host_latency_s: float = setting(
        20e-6,
        Number(0, 1),
        "Seconds that an exchange takes in addition if the GPUs of a copy are in several hosts.",
        "NVIDIA AIConfigurator, system files, 2026-08-21: p2p_latency, there and back",
    )
    adapter_bytes_per_s: float = setting(
        50e9,
        Number(1e6, 1e16),
        "Bytes a second of a GPU's network adapter, over which GPUs of several hosts exchange.",
        "assumed: an adapter for each GPU, at the line rate of nic-400g in the catalogue",
    )
    watts: float = setting(0.0, Or(Number(1, 1e5), _CATALOGUE), "Maximum power of one GPU.")
    flops_share: float = setting(0.5, Number(0.01, 1), "Share of the peak that prefill reaches (MFU).", "rule of thumb")
    expert_flops_share: float = setting(
        0.15,
        Number(0.01, 1),
        "Share of the peak that prefill of a mixture of experts reaches, since its products are small.",
        "calibrated: docs/planning.md",
    )
    memory_rate_share: float = setting(
        0.8,
        Number(0.01, 1),
        "Share of the bandwidth that decoding reaches.",
        "NVIDIA AIConfigurator, system files, 2026-08-21",
    )
    memory_share: float = setting(
        GPU_MEMORY_SHARE,
        Number(0.05, 1),
        "Share of GPU memory that the engine may take.",
        "vLLM 0.32, gpu_memory_utilization",
    )
    other_bytes: int = setting(
        GPU_OTHER_BYTES,
        RoundSize(0, 2**42),
        "GPU memory for activations and libraries.",
        "NVIDIA AIConfigurator, system files, 2026-08-21",
    )
    batch_max: int = setting(256, Count(1, 10**6), "Most requests that decode together.", "vLLM 0.32, smaller GPUs")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficInputs(SettingsSection):
    """Rate, lengths and reuse of requests. Most of these come from the trace, if there is one."""

    section: ClassVar[str] = "traffic"

    users: int = setting(80, Count(1, 10**9), "Users at the same time.", "LMBenchmark, multi-round QA")
    turns: int = setting(10, Count(1, 10**5), "Queries of one conversation.", "LMBenchmark, multi-round QA")
    interval_s: float = setting(20.0, Seconds(1e-3, 1e7), "Mean time between two queries of a user.")
    interval_cv: float = setting(
        1.7,
        Or(Number(0, 20), "constant"),
        "Coefficient of variation of that interval.",
        "fitted to Mooncake's conversation trace",
    )
    prefix_tokens: int = setting(1000, _TOKENS, "Tokens of the shared system prompt.", "LMBenchmark, multi-round QA")
    history_tokens: int = setting(
        20_000, _TOKENS, "Tokens of a conversation before its first query.", "LMBenchmark, long run"
    )
    question_tokens: int = setting(100, Count(1, 10**8), "Tokens that each query adds.")
    answer_tokens: int = setting(100, Count(1, 10**7), "Tokens of an answer.", "LMBenchmark, long run")
    reuse: float | None = setting(
        None, Or(Number(0, 1), "from turns and lengths", None), "Share of prompt tokens that occur in earlier prompts."
    )
    arrivals_cv2: float = setting(
        1.0, Number(0, 100), "Squared coefficient of variation of the times between queries; 1: independent users."
    )
    trace: str = setting("", _NAME, "Measure the traffic in this file.")
    trace_window_s: float = setting(
        86_400.0, Seconds(1, 1e8), "Time over which sessions start, for a trace without absolute times."
    )
    trace_time_unit: str = setting(
        "", ChoiceKind(("", "s", "ms", "us")), "Unit of the trace's timestamps; none: that of its format."
    )
    day_share: float = setting(
        1.0,
        Number(0.001, 1),
        "Average load of a day over this load, for the wear of drives only.",
    )
    load: float = setting(1.0, Number(1e-6, 1e9), "Requests a second, as a multiple of the trace's; with a trace only.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInputs(SettingsSection):
    """Service levels and margins."""

    section: ClassVar[str] = "target"

    ttft_s: float = setting(
        1.0,
        Or(Seconds(1e-3, 1e5), "no limit"),
        "Limit of the mean time to first token; target.ttft_p95_s alone replaces it.",
    )
    ttft_p95_s: float = setting(
        0.0, Or(Seconds(1e-3, 1e5), "no limit"), "Limit of the time to first token of 95 % of the requests."
    )
    tpot_s: float = setting(0.0, Or(Number(1e-4, 1e3), "no limit"), "Limit of the time per output token, in seconds.")
    hit_share: float = setting(0.95, Number(0.01, 0.9999), "Share of reusable tokens that the tiers must hold.")
    burst: float = setting(2.0, Number(1, 100), "Bandwidth to provide over the average.", "Samsung PM1753 paper, 2025")
    life_years: float = setting(5.0, Number(0.1, 50), "Required life of the drives.")
    gpu_used: float = setting(
        0.7, Number(0.05, 1), "Share of the measured throughput to plan with, in the formula for GPUs.", "rule of thumb"
    )

    def __post_init__(self) -> None:
        """Refuse a plan that does not limit the time to first token."""
        SettingsSection.__post_init__(self)
        if not (self.ttft_s or self.ttft_p95_s):
            raise ConfigError(
                "target.ttft_s and target.ttft_p95_s are both 0, which means no limit; set a limit for one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInputs(SettingsSection):
    """The hosts, and the host memory of all of them together. Defaults are for one host."""

    section: ClassVar[str] = "host"

    gpus: int = setting(8, Count(1, 1024), "GPUs of one host.", "the usual server")
    capacity_bytes: int = setting(2**40, RoundSize(0, 2**60), "Host memory for KV, of all hosts; 0: none.")
    memory: str = setting("ddr5-4800", _NAME, "The kind of memory.")
    channels: int = setting(16, Count(1, 10**8), "Memory channels, of all sockets of all hosts.")
    channel_bytes_per_s: float = setting(0.0, Or(Rate(), _CATALOGUE), "Bandwidth of one channel.")
    share: float = setting(0.5, Number(0.01, 1), "Share of that bandwidth for KV.", "rule of thumb")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskInputs(SettingsSection):
    """The local drives of all hosts together."""

    section: ClassVar[str] = "disk"

    name: str = setting("pm1753", _NAME, "The kind of drive.")
    count: int = setting(4, Count(0, 10**8), "Drives of all hosts; 0: none.")
    capacity_bytes: int = setting(0, Or(RoundSize(0, 2**55), _CATALOGUE), "Capacity of one drive.")
    read_bytes_per_s: float = setting(0.0, Or(Rate(), _CATALOGUE), "Reads of one drive, sequential.")
    write_bytes_per_s: float = setting(0.0, Or(Rate(), _CATALOGUE), "Writes of one drive, sequential.")
    drive_writes_per_day: float = setting(0.0, Or(Number(0.001, 1000), _CATALOGUE), "Rated drive writes a day.")
    rated_years: float = setting(5.0, Number(0.1, 30), "Years of that rating.", "the usual warranty")
    wear: float = setting(1.0, Number(0.01, 100), "Wear of a byte of KV over that of a byte of the rating's workload.")
    watts: float = setting(0.0, Or(Number(0.1, 1000), _CATALOGUE), "Power of one active drive.")
    filled: float = setting(0.9, Number(0.05, 1), "Share of the capacity for KV.", "rule of thumb")
    command_bytes: int = setting(2**20, RoundSize(4096, 2**30), "Bytes of one command (the drive's MDTS).")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedInputs(SettingsSection):
    """Storage that the hosts share, behind a network."""

    section: ClassVar[str] = "shared"

    capacity_bytes: int = setting(0, RoundSize(0, 2**70), "Shared storage for KV; 0: none.")
    network: str = setting("nic-400g", _NAME, "The kind of network adapter.")
    adapters: int = setting(1, Count(1, 10**8), "Network adapters, of all hosts together.")
    adapter_bytes_per_s: float = setting(0.0, Or(Rate(), _CATALOGUE), "Bandwidth of one adapter, one direction.")
    read_bytes_per_s: float = setting(0.0, Or(Rate(), "that of the adapters"), "Reads of the whole store.")
    write_bytes_per_s: float = setting(0.0, Or(Rate(), "that of the adapters"), "Writes of the whole store.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareInputs(SettingsSection):
    """Behavior of the engine and the cache."""

    section: ClassVar[str] = "software"

    chunk_tokens: int = setting(256, Count(1, 2**20), "Tokens of a chunk.")
    load_bytes_per_s: float = setting(
        6e9,
        Or(Rate(), "link times link_share"),
        "Load bandwidth that the software reaches, for one GPU.",
        "what LMCache 0.3.3 reached in Samsung's test; measure yours with kvtier probe",
    )
    link_share: float = setting(0.8, Number(0.01, 1), "Share of the GPU's link that loads reach.", "rule of thumb")
    loads_block: bool = setting(
        default=False, kind=Switch(), help="The GPU waits while a prompt loads, instead of serving other requests."
    )
    skips_slow_loads: bool = setting(
        default=True, kind=Switch(), help="Prompts that load more slowly than they compute are computed."
    )
    gpu_reuse: bool = setting(default=True, kind=Switch(), help="The engine reuses KV in GPU memory (prefix caching).")
    chunks_in_flight: int = setting(4, Count(1, 10**4), "Chunks that one loading prompt reads in parallel.")
    write_share: float = setting(1.0, Number(0, 1), "Share of new KV that is written to the drives (admission).")
    copies: int = setting(
        1,
        Or(Count(0, 1024), "one for each rank"),
        "Copies in tiers of KV that several ranks need: MLA's latent, heads fewer than ranks. GPUs hold one each.",
        "kvtier's own tiers",
    )
    snapshots: int = setting(1, Count(1, 10**5), "Snapshots of recurrent states that one request stores.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceInputs(SettingsSection):
    """Prices. kvtier ships no market prices, and omits figures that need a missing price."""

    section: ClassVar[str] = "price"

    currency: str = setting("USD", _NAME, "Unit of all prices.")
    years: float = setting(3.0, Number(0.1, 50), "Years for which the hardware is used.", "Samsung PM1753 paper, 2025")
    gpu: float = setting(0.0, Or(Number(1e-9, 1e9), "not given"), "One GPU.")
    server: float = setting(
        0.0,
        Or(Number(1e-9, 1e12), "not given"),
        "One server without GPUs, host memory and drives; with GPUs where price.gpu is not given.",
    )
    host_memory_per_gb: float = setting(0.0, Or(Number(1e-9, 1e9), "not given"), "Host memory, for 10^9 bytes.")
    drive: float = setting(0.0, Or(Number(1e-9, 1e9), "not given"), "One drive.")
    shared_per_tb: float = setting(0.0, Or(Number(1e-9, 1e9), "not given"), "Shared storage, for 10^12 bytes.")
    energy_per_kwh: float = setting(0.0, Or(Number(1e-9, 1e6), "not given"), "One kWh of energy.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerInputs(SettingsSection):
    """Power of servers and idle GPUs, and the overhead of the site."""

    section: ClassVar[str] = "power"

    server_watts: float = setting(
        1500.0,
        Number(1, 1e9),
        "Everything but GPUs and drives, of all hosts; the default counts whole hosts, or the GPUs of a single one.",
        "rule of thumb, a server of 8 GPUs",
    )
    gpu_idle_share: float = setting(0.15, Number(0, 1), "Power of an idle GPU over its maximum.", "rule of thumb")
    pue: float = setting(1.0, Number(1, 5), "Power of the site over that of the machines; 1: without cooling.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All inputs of a plan, and the origin of each by ``section.key``."""

    model: ModelInputs = field(default_factory=ModelInputs)
    gpu: GpuInputs = field(default_factory=GpuInputs)
    traffic: TrafficInputs = field(default_factory=TrafficInputs)
    target: TargetInputs = field(default_factory=TargetInputs)
    host: HostInputs = field(default_factory=HostInputs)
    disk: DiskInputs = field(default_factory=DiskInputs)
    shared: SharedInputs = field(default_factory=SharedInputs)
    software: SoftwareInputs = field(default_factory=SoftwareInputs)
    price: PriceInputs = field(default_factory=PriceInputs)
    power: PowerInputs = field(default_factory=PowerInputs)
    origins: Mapping[str, str] = field(default_factory=dict[str, str])

    def value(self, name: str) -> object:
        """Return the value of ``section.key``."""
        section, _, key = name.partition(".")
        return getattr(getattr(self, section), key)

    def origin(self, name: str) -> str:
        """Return the origin of the value of ``section.key``."""
        source = SETTINGS[name].source
        return self.origins.get(name) or (f"default ({source})" if source else "default")

    def change(self, values: Mapping[str, object], origin: str = "Python") -> "Inputs":
        """Return a copy with some values replaced. `values` names them by ``section.key``.

        Raises:
            ConfigError: a value is not allowed.
        """
        changed: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, _, key = name.partition(".")
            changed.setdefault(section, {})[key] = value
        parts: dict[str, Any] = {name: replace(getattr(self, name), **keys) for name, keys in changed.items()}
        return replace(self, **parts, origins={**self.origins, **dict.fromkeys(values, origin)})


SECTIONS: dict[str, type[SettingsSection]] = {
    kind.section: kind
    for kind in (
        ModelInputs,
        GpuInputs,
        TrafficInputs,
        TargetInputs,
        HostInputs,
        DiskInputs,
        SharedInputs,
        SoftwareInputs,
        PriceInputs,
        PowerInputs,
    )
}

SETTINGS: dict[str, Setting] = {each.name: each for kind in SECTIONS.values() for each in settings(kind)}
"""All settings by ``section.key``, in the order in which they are written."""
