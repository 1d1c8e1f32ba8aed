"""Every input of a plan: its section, default, what is allowed, what it is for, and where the default comes from.

To add one: a line here. The file reader, `--set`, the list of assumptions, the messages and the sensitivity follow.
A 0 means "from the catalogue", "from the model" or "not given" where the line says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from kvtier.config.kinds import Choice, Count, Seconds, Switch
from kvtier.config.schema import Section, Setting, setting, settings
from kvtier.plan.kinds import Capacity, Maybe, Rate, Real, Word

_CATALOGUE = "from the catalogue"
_TOKENS = Count(0, 10**8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Section):
    """What is served."""

    section: ClassVar[str] = "model"

    name: str = setting("", Word("a name that `kvtier size` knows, or a config.json"), "The model.")
    kv_dtype: str = setting("bf16", Word("a format that `kvtier size` knows, such as bf16 or fp8"), "Format of the KV.")
    weights: Literal["bf16", "fp8", "fp4"] = setting("bf16", Choice(("bf16", "fp8", "fp4")), "Format of the weights.")
    tp: int = setting(1, Count(1, 1024), "GPUs that serve one copy of the model (tensor parallel).")
    parameters: float = setting(
        0.0, Real(1e6, 1e14, "from the model"), "All parameters: they take GPU memory, and decoding reads them."
    )
    active_parameters: float = setting(
        0.0, Real(1e6, 1e14, "from the model"), "Parameters that each prompt token is multiplied with."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(Section):
    """The GPUs, and how much of their data sheet an engine reaches."""

    section: ClassVar[str] = "gpu"

    name: str = setting("h100-sxm", Word("a GPU of the catalogue"), "The kind of GPU.")
    count: int = setting(8, Count(1, 10**6), "GPUs.")
    flops: float = setting(0.0, Real(1e9, 1e18, _CATALOGUE), "Peak FLOP/s of one GPU, dense, in the weights' format.")
    memory_bytes: int = setting(0, Capacity(0, 2**50, _CATALOGUE), "Memory of one GPU.")
    memory_bytes_per_s: float = setting(0.0, Rate(), "Bandwidth of that memory.")
    link_bytes_per_s: float = setting(0.0, Rate(), "Link of one GPU to its host, one direction.")
    watts: float = setting(0.0, Real(1, 1e5, _CATALOGUE), "Most power that one GPU takes.")
    flops_share: float = setting(0.5, Real(0.01, 1), "Share of the peak that prefill reaches (MFU).", "rule of thumb")
    memory_rate_share: float = setting(
        0.8,
        Real(0.01, 1),
        "Share of the bandwidth that decoding reaches.",
        "NVIDIA AIConfigurator, system files, 2026-08-21",
    )
    memory_share: float = setting(
        0.92, Real(0.05, 1), "Share of GPU memory that the engine may take.", "vLLM 0.32, gpu_memory_utilization"
    )
    other_bytes: int = setting(
        3_758_096_384,
        Capacity(0, 2**42),
        "GPU memory for activations and libraries.",
        "NVIDIA AIConfigurator, system files, 2026-08-21",
    )
    batch_max: int = setting(256, Count(1, 10**6), "Most requests that decode together.", "vLLM 0.32, smaller GPUs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(Section):
    """Who asks what, and how often. With a trace, most of it is measured there."""

    section: ClassVar[str] = "traffic"

    users: int = setting(80, Count(1, 10**9), "Users at the same time.", "LMBenchmark, multi-round QA")
    turns: int = setting(10, Count(1, 10**5), "Queries of one conversation.", "LMBenchmark, multi-round QA")
    interval_s: float = setting(20.0, Seconds(1e-3, 1e7), "From one query of a user to the next, on average.")
    interval_cv: float = setting(
        1.7,
        Real(0, 20, "always the same"),
        "Spread of that interval: standard deviation over mean.",
        "fitted to Mooncake's conversation trace",
    )
    prefix_tokens: int = setting(1000, _TOKENS, "System prompt that all share.", "LMBenchmark, multi-round QA")
    history_tokens: int = setting(20_000, _TOKENS, "What a conversation begins with.", "LMBenchmark, long run")
    question_tokens: int = setting(100, Count(1, 10**8), "What each query adds.")
    answer_tokens: int = setting(100, Count(1, 10**7), "Tokens of an answer.", "LMBenchmark, long run")
    reuse: float | None = setting(
        None, Maybe(Real(0, 1), "from turns and lengths"), "Share of prompt tokens that some prompt before had."
    )
    arrivals_cv2: float = setting(
        1.0, Real(0, 100), "Squared coefficient of variation of the times between queries; 1: independent users."
    )
    trace: str = setting("", Word("a trace file, .jsonl or .csv, also .gz"), "Measure the traffic in this file.")
    trace_window_s: float = setting(
        86_400.0, Seconds(1, 1e8), "Sessions of a trace without absolute times start spread over so long."
    )
    day_share: float = setting(
        1.0, Real(0.001, 1), "Average of a day over this load; drives wear by the day, all else is for the busy hours."
    )
    load: float = setting(1.0, Real(1e-6, 1e9), "Requests a second, as a multiple of the trace's; with a trace only.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Section):
    """What is good enough."""

    section: ClassVar[str] = "target"

    ttft_s: float = setting(1.0, Seconds(1e-3, 1e5), "Mean time to first token, at most.")
    tpot_s: float = setting(0.0, Real(1e-4, 1e3, "no limit"), "Time for each further token, at most, in seconds.")
    hit_share: float = setting(0.95, Real(0.01, 0.9999), "Share of what can be reused that the tiers must hold.")
    burst: float = setting(
        2.0, Real(1, 100), "Provide so many times the average bandwidth.", "Samsung PM1753 paper, 2025"
    )
    life_years: float = setting(5.0, Real(0.1, 50), "How long the drives must last.")
    gpu_used: float = setting(
        0.7, Real(0.05, 1), "Share of the measured throughput to plan with, in the formula for GPUs.", "rule of thumb"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(Section):
    """Host memory of all hosts together."""

    section: ClassVar[str] = "host"

    capacity_bytes: int = setting(2**40, Capacity(0, 2**60), "Host memory for KV; 0: none.")
    memory: str = setting("ddr5-4800", Word("a memory of the catalogue"), "The kind of memory.")
    channels: int = setting(16, Count(1, 10**6), "Memory channels, of all sockets together.")
    channel_bytes_per_s: float = setting(0.0, Rate(), "Bandwidth of one channel.")
    share: float = setting(0.5, Real(0.01, 1), "Share of that bandwidth that KV may use.", "rule of thumb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk(Section):
    """Local drives, of all hosts together."""

    section: ClassVar[str] = "disk"

    name: str = setting("pm1753", Word("a drive of the catalogue"), "The kind of drive.")
    count: int = setting(4, Count(0, 10**6), "Drives; 0: none.")
    capacity_bytes: int = setting(0, Capacity(0, 2**55, _CATALOGUE), "Capacity of one drive.")
    read_bytes_per_s: float = setting(0.0, Rate(), "Reads of one drive, sequential.")
    write_bytes_per_s: float = setting(0.0, Rate(), "Writes of one drive, sequential.")
    drive_writes_per_day: float = setting(0.0, Real(0.001, 1000, _CATALOGUE), "Rated drive writes a day.")
    rated_years: float = setting(5.0, Real(0.1, 30), "For so many years.", "the usual warranty")
    wear: float = setting(1.0, Real(0.01, 100), "Wear of a byte of KV against one of the rating's workload.")
    watts: float = setting(0.0, Real(0.1, 1000, _CATALOGUE), "Power of one drive at work.")
    filled: float = setting(0.9, Real(0.05, 1), "Share of the capacity that KV may fill.", "rule of thumb")
    command_bytes: int = setting(2**20, Capacity(4096, 2**30), "Bytes of one command (the drive's MDTS).")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared(Section):
    """Storage that a cluster shares, behind a network."""

    section: ClassVar[str] = "shared"

    capacity_bytes: int = setting(0, Capacity(0, 2**70), "Shared storage for KV; 0: none.")
    network: str = setting("nic-400g", Word("a network of the catalogue"), "The kind of network adapter.")
    adapters: int = setting(1, Count(1, 10**6), "Network adapters, of all hosts together.")
    adapter_bytes_per_s: float = setting(0.0, Rate(), "Bandwidth of one adapter, one direction.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Software(Section):
    """What the cache software does with the hardware."""

    section: ClassVar[str] = "software"

    chunk_tokens: int = setting(256, Count(1, 2**20), "Tokens of a chunk.")
    load_bytes_per_s: float = setting(
        0.0, Rate(zero_means="link times link_share"), "Load stream that the software reaches, for one GPU."
    )
    link_share: float = setting(0.8, Real(0.01, 1), "Share of the GPU's link that loads reach.", "rule of thumb")
    loads_block: bool = setting(
        default=False, kind=Switch(), help="The GPU waits while a prompt loads, instead of serving others."
    )
    skips_slow_loads: bool = setting(
        default=True, kind=Switch(), help="What would load more slowly than it computes is computed."
    )
    gpu_reuse: bool = setting(
        default=True, kind=Switch(), help="With tiers, the engine also reuses what is still in GPU memory."
    )
    chunks_in_flight: int = setting(4, Count(1, 10**4), "Chunks that one loading prompt reads at a time.")
    write_share: float = setting(1.0, Real(0, 1), "Share of new KV that is written to the drives (admission).")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price(Section):
    """Prices, all yours: kvtier ships none. 0: not given, and what needs it is not computed."""

    section: ClassVar[str] = "price"

    currency: str = setting("USD", Word("a currency or another unit"), "Unit of all prices.")
    years: float = setting(3.0, Real(0.1, 50), "What is bought is used for so long.", "Samsung PM1753 paper, 2025")
    gpu: float = setting(0.0, Real(1e-9, 1e9, "not given"), "One GPU.")
    server: float = setting(
        0.0,
        Real(1e-9, 1e12, "not given"),
        "All but GPUs, host memory and drives; where price.gpu is not given, with GPUs.",
    )
    host_memory_per_gb: float = setting(0.0, Real(1e-9, 1e9, "not given"), "Host memory, for 10^9 bytes.")
    drive: float = setting(0.0, Real(1e-9, 1e9, "not given"), "One drive.")
    shared_per_tb: float = setting(0.0, Real(1e-9, 1e9, "not given"), "Shared storage, for 10^12 bytes.")
    energy_per_kwh: float = setting(0.0, Real(1e-9, 1e6, "not given"), "Energy.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Power(Section):
    """Power of what is neither drive nor GPU at full load."""

    section: ClassVar[str] = "power"

    server_watts: float = setting(
        1500.0, Real(1, 1e9), "Everything but GPUs and drives.", "rule of thumb, 8-GPU server"
    )
    gpu_idle_share: float = setting(0.15, Real(0, 1), "What a GPU takes while it waits, of its most.", "rule of thumb")
    pue: float = setting(1.0, Real(1, 5), "Power of the whole site over that of the machines; 1: without cooling.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All inputs of a plan, and by ``section.key`` where each came from."""

    model: Model = field(default_factory=Model)
    gpu: Gpu = field(default_factory=Gpu)
    traffic: Traffic = field(default_factory=Traffic)
    target: Target = field(default_factory=Target)
    host: Host = field(default_factory=Host)
    disk: Disk = field(default_factory=Disk)
    shared: Shared = field(default_factory=Shared)
    software: Software = field(default_factory=Software)
    price: Price = field(default_factory=Price)
    power: Power = field(default_factory=Power)
    origins: Mapping[str, str] = field(default_factory=dict[str, str])

    def value(self, name: str) -> object:
        """The value of ``section.key``."""
        section, _, key = name.partition(".")
        return getattr(getattr(self, section), key)

    def origin(self, name: str) -> str:
        """Where the value of ``section.key`` came from."""
        source = SETTINGS[name].source
        return self.origins.get(name) or (f"default ({source})" if source else "default")

    def change(self, values: Mapping[str, object], origin: str = "Python") -> "Inputs":
        """These inputs with some values replaced, by ``section.key``.

        Raises:
            ConfigError: a value is not allowed.
        """
        parts: dict[str, Any] = {}
        for name, value in values.items():
            section, _, key = name.partition(".")
            parts[section] = replace(parts.get(section, getattr(self, section)), **{key: value})
        return replace(self, **parts, origins={**self.origins, **dict.fromkeys(values, origin)})


SECTIONS: dict[str, type[Section]] = {
    kind.section: kind for kind in (Model, Gpu, Traffic, Target, Host, Disk, Shared, Software, Price, Power)
}

SETTINGS: dict[str, Setting] = {it.name: it for kind in SECTIONS.values() for it in settings(kind)}
"""By ``section.key``, in the order they are written."""
