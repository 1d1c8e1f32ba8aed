"""Every setting: its section, type, default, what is allowed and what it is for.

To add one: a line here, nothing else. The loader, the environment, `--set`, `config show` and the messages follow.
"""
# ruff: noqa: RUF009 - setting is dataclasses.field with our metadata

from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar, Literal

from kvtier.codec import registry as codecs
from kvtier.config.kinds import Choice, Count, Hidden, Location, Named, Seconds, Size, Switch
from kvtier.config.schema import Setting, SettingsSection, near, setting, settings
from kvtier.errors import ConfigError
from kvtier.keys.secret import Secret
from kvtier.policy.registry import DEFAULT_EVICTOR, EVICTORS

Mode = Literal["auto", "on", "off"]

_MODE = Choice(("auto", "on", "off"))
_REQUIRED = "Refuse to start when its place fails; false: start without it, and take it in when it can be opened."


def _evictors() -> list[str]:
    return [*EVICTORS, *sorted(entry_points(group="kvtier.evictors").names - EVICTORS.keys())]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig(SettingsSection):
    """Host memory: the arena of slots through which every chunk goes."""

    section: ClassVar[str] = "host"

    capacity_bytes: int = setting(4 * 2**30, Size(2**20), "Host memory for chunks, of each engine; taken at start.")
    evictor: str = setting(DEFAULT_EVICTOR, Named(_evictors), "Who leaves host memory when it is full.")
    page_lock: Mode = setting("auto", _MODE, "Page-lock host memory for fast copies to the GPU; auto: where CUDA is.")
    populate: bool = setting(
        default=False, kind=Switch(), help="Touch all host memory at start: a slower start, no page fault later."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryConfig(SettingsSection):
    """The directory tier: a file per object, on a local disk or a shared file system."""

    section: ClassVar[str] = "directory"

    path: Path | None = setting(None, Location(), "Where chunks are kept; none: no directory tier.")
    capacity_bytes: int = setting(64 * 2**30, Size(2**20), "Most bytes on disk, of all processes together.")
    direct_io: Mode = setting("auto", _MODE, "Go around the kernel's cache; auto: where the file system allows.")
    evictor: str = setting(DEFAULT_EVICTOR, Named(_evictors), "Who leaves the directory when it is full.")
    shared: bool = setting(
        default=True,
        kind=Switch(),
        help="Other processes write here too; false: believe our own index, so a miss costs nothing.",
    )
    read_threads: int = setting(4, Count(1, 256), "Threads that read chunks from the directory.")
    write_threads: int = setting(2, Count(1, 256), "Threads that write chunks to the directory.")
    required: bool = setting(default=False, kind=Switch(), help=_REQUIRED)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig(SettingsSection):
    """The disk tier: preallocated segments on a local drive, for one engine alone."""

    section: ClassVar[str] = "disk"

    path: Path | None = setting(None, Location(), "Where segments are kept, on a local drive; none: no disk tier.")
    capacity_bytes: int = setting(64 * 2**30, Size(2**20), "Most bytes on the drive, of all ranks together.")
    direct_io: Mode = setting("auto", _MODE, "Go around the kernel's cache; auto: where the file system allows.")
    reserve_bytes: int = setting(2**30, Size(0), "Free space of the file system that is left to others.")
    sync_interval_s: float = setting(1.0, Seconds(1e-2, 3600), "About how much time of writes a crash may forget.")
    write_bytes_per_day: int = setting(
        0, Size(0), "What the drive's endurance allows each rank to write in a day; 0: no limit."
    )
    read_threads: int = setting(4, Count(1, 256), "Threads that read chunks from the disk.")
    write_threads: int = setting(2, Count(1, 256), "Threads that write chunks to the disk.")
    required: bool = setting(default=False, kind=Switch(), help=_REQUIRED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(SettingsSection):
    """What is stored, when, and under which names."""

    section: ClassVar[str] = "store"

    chunk_tokens: int = setting(
        0, Count(0, 2**20), "Tokens of a chunk; 0: the smallest multiple of the engine's alignment from 256 on."
    )
    write_policy: Literal["through", "back", "selective"] = setting(
        "through",
        Choice(("through", "back", "selective")),
        "When a chunk goes below host memory: as soon as it is ready, when it is evicted, or at its n-th use.",
    )
    selective_uses: int = setting(2, Count(1, 1000), "The n of write_policy = selective.")
    codec: str = setting("raw", Named(codecs.names), "What happens to the bytes on their way out of host memory.")
    secret_file: Path | None = setting(
        None, Location(), "File with the secret that keys all names; none: made beside what a tier keeps (mode 0600)."
    )
    secret: Secret | None = setting(
        None, Hidden(), "The secret itself, for stores that share one; better in a file or the environment than a flag."
    )

    def __post_init__(self) -> None:
        SettingsSection.__post_init__(
            self
        )  # slots make a new class, so that super() without arguments finds the wrong one
        if self.secret is not None and self.secret_file is not None:
            raise ConfigError("store.secret and store.secret_file are both set; allowed: one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig(SettingsSection):
    """How much may be under way, and for how long."""

    section: ClassVar[str] = "limits"

    loads_in_flight: int = setting(16, Count(1, 1024), "Promotes (lower tier to host) at once, for each tier.")
    stores_in_flight: int = setting(16, Count(1, 1024), "Gathers (engine to host) at once.")
    demotes_in_flight: int = setting(8, Count(1, 1024), "Demotes (host to lower tier) at once, for each tier.")
    small_bytes_in_flight: int = setting(
        16 * 2**20,
        Size(0),
        "Small objects may be more than these loads and demotes at once: so many bytes of each, for each tier.",
    )
    scatters_in_flight: int = setting(16, Count(1, 1024), "Scatters (host to engine) at once.")
    waiting_chunks: int = setting(4096, Count(0, 10**6), "Objects of stores that may wait for room; more are dropped.")
    requests: int = setting(4096, Count(1, 10**6), "Requests tracked; more are looked up in host memory only.")
    probe_deadline_s: float = setting(
        0.5, Seconds(1e-3, 60), "How long a lower tier may take to say what it holds; after it, absent."
    )
    load_deadline_s: float = setting(30.0, Seconds(1e-2, 3600), "How long a load may take; after it, recomputed.")
    transfer_deadline_s: float = setting(10.0, Seconds(1e-2, 3600), "How long one transfer may take; then it failed.")
    store_deadline_s: float = setting(10.0, Seconds(0, 3600), "How long a store waits for room before it is dropped.")
    open_deadline_s: float = setting(
        30.0, Seconds(1e-2, 3600), "How long start waits for a tier to open; it may come in later."
    )
    close_deadline_s: float = setting(30.0, Seconds(0, 3600), "How long closing may take to flush what was stored.")
    tier_failures: int = setting(3, Count(1, 1000), "Failures in a row after which a tier is left alone.")
    tier_retry_s: float = setting(5.0, Seconds(1e-2, 3600), "After how long a tier that was left alone is tried again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig(SettingsSection):
    """Load or compute."""

    section: ClassVar[str] = "planner"

    enabled: bool = setting(
        default=True, kind=Switch(), help="Load only what is there sooner than computed; false: load whatever there is."
    )
    probe_file: Path | None = setting(
        None, Location(), "Record of `kvtier probe`: how fast links are believed to be until they are seen; none: fast."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig(SettingsSection):
    """A record of requests, to be replayed; it tells lengths, times and which blocks are equal."""

    section: ClassVar[str] = "trace"

    path: Path | None = setting(None, Location(), "Directory for recordings of requests; none: nothing is recorded.")
    capacity_bytes: int = setting(2**30, Size(2**12), "Most bytes of recordings in it; then recording stops.")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig(SettingsSection):
    """What kvtier does inside vLLM."""

    section: ClassVar[str] = "vllm"

    prefix_protection: bool = setting(
        default=True,
        kind=Switch(),
        help="Reorder vLLM's free blocks so that those of waiting prompts are handed out last; false: vLLM's order.",
    )
    unsupported: Literal["refuse", "allow", "selftest"] = setting(
        "refuse",
        Choice(("refuse", "allow", "selftest")),
        "A vLLM that was never tried; allow: where `doctor --selftest` has passed; selftest: for that test alone.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(SettingsSection):
    """Which lines kvtier logs in vLLM; elsewhere the program that uses kvtier decides."""

    section: ClassVar[str] = "log"

    level: Literal["engine", "debug", "info", "warning", "error"] = setting(
        "engine",
        Choice(("engine", "debug", "info", "warning", "error")),
        "Least level of kvtier's lines in vLLM's log; engine: that of vLLM's own (VLLM_LOGGING_LEVEL).",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings. Constructors elsewhere take values from it, never the tree."""

    host: HostConfig = field(default_factory=HostConfig)
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    log: LogConfig = field(default_factory=LogConfig)


SECTIONS: dict[str, type[SettingsSection]] = {
    kind.section: kind
    for kind in (
        HostConfig,
        DirectoryConfig,
        DiskConfig,
        StoreConfig,
        LimitsConfig,
        PlannerConfig,
        TraceConfig,
        VllmConfig,
        LogConfig,
    )
}


def find_section(section: str, origin: str) -> type[SettingsSection]:
    """The section of that name.

    Raises:
        ConfigError: there is none; the message names those that are known, and the nearest.
    """
    if section not in SECTIONS:
        raise ConfigError(f"{section} (from {origin}): unknown section{near(section, list(SECTIONS))}")
    return SECTIONS[section]


def find(section: type[SettingsSection], key: str, origin: str) -> Setting:
    """The setting `key` of `section`.

    Raises:
        ConfigError: there is none; the message names those that are known, and the nearest.
    """
    known = {setting.key: setting for setting in settings(section)}
    if key not in known:
        raise ConfigError(f"{section.section}.{key} (from {origin}): unknown setting{near(key, list(known))}")
    return known[key]


def value_of(config: Config, setting: Setting) -> object:
    """What `config` says for `setting`."""
    return getattr(getattr(config, setting.section), setting.key)
