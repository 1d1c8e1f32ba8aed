"""Defines every setting: its section, type, default, allowed values and help.

To add a setting, add a line here. The loader, the environment, `--set`, `config show` and messages then include it.
"""
# ruff: noqa: RUF009 - setting is dataclasses.field with our metadata

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from kvtier.codec import registry as codecs
from kvtier.config.schema import Setting, SettingsSection, setting, settings, unknown
from kvtier.config.tier_list import refuse_equal_names
from kvtier.config.value_types import (
    ChoiceKind,
    Count,
    FormedText,
    Hidden,
    HiddenKeys,
    Location,
    PrivateText,
    Seconds,
    SecretLocation,
    Size,
    Switch,
)
from kvtier.errors import ConfigError
from kvtier.keys.seal_keys import TENANT
from kvtier.keys.secret import Secret
from kvtier.layout import Loss
from kvtier.policy.registry import DEFAULT_EVICTOR, evictor_names
from kvtier.tier import registry
from kvtier.tier.registry import TierSettings

Mode = Literal["auto", "on", "off"]

_MODE = ChoiceKind(("auto", "on", "off"))

HOW_TO_SHARE = (
    "create a secret with (umask 077; head -c 32 /dev/urandom > FILE), copy FILE to each node, and set "
    "store.secret_file = FILE (or set store.secret)"
)
"""Text for messages about how to get a secret for a shared tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig(SettingsSection):
    """Settings of host memory, whose slots every chunk passes through."""

    section: ClassVar[str] = "host"

    capacity_bytes: int = setting(4 * 2**30, Size(2**20), "Host memory for chunks, per engine; allocated at start.")
    evictor: str = setting(DEFAULT_EVICTOR, ChoiceKind(evictor_names), "Eviction policy of host memory.")
    page_lock: Mode = setting("auto", _MODE, "Page-lock host memory for fast GPU copies; auto: if CUDA is available.")
    populate: bool = setting(
        default=False, kind=Switch(), help="Touch all host memory at start: slower start, no page faults later."
    )
    staging_bytes: int = setting(
        256 * 2**20,
        Size(2**16),
        "Host memory per rank for objects in transit, with engines that keep their own host memory.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(SettingsSection):
    """Settings of chunks, the write policy and names."""

    section: ClassVar[str] = "store"

    chunk_tokens: int = setting(
        0, Count(0, 2**20), "Tokens per chunk; 0: the smallest multiple of the engine's alignment, at least 256."
    )
    token_shares: int = setting(
        0,
        Count(0, 64),
        "vLLM: number of shares of the tokens of MLA's latents, so that engines with other TP and DCP sizes "
        "find them; a multiple of each DCP size; 0: engines of one shape share.",
    )
    write_policy: Literal["through", "back", "selective"] = setting(
        "through",
        ChoiceKind(("through", "back", "selective")),
        "When a chunk is written to lower tiers: as soon as it is ready, before its eviction, or at its second use.",
    )
    loss: Loss = setting(
        "none",
        ChoiceKind(lambda: ["none", *codecs.lossy_names()]),
        "Class of the engine: the lossy codec that its KV in lower tiers may go through. Engines share KV only within "
        "a class; none: KV stays exact.",
    )
    codec: str = setting(
        "auto",
        ChoiceKind(lambda: ["auto", *codecs.names(), *codecs.lossy_names()]),
        "Encoding of chunks in lower tiers: lossless, or the codec of store.loss; auto: the codec of store.loss, or "
        "raw without one.",
    )
    secret_file: Path | None = setting(
        None,
        SecretLocation(),
        "File with the secret that keys all names; none: created in a tier's store (mode 0600).",
        is_private=True,
    )
    secret: Secret | None = setting(
        None, Hidden(), "The secret itself, for stores that share one. Prefer a file or the environment to a flag."
    )
    keys_file: Path | None = setting(
        None,
        SecretLocation(),
        "File with keys of sealed frames (mode 0600), read again every minute; none: the secret is the key.",
        is_private=True,
    )
    keys_command: str = setting(
        "",
        FormedText(form="a program and its arguments, quoted as in a shell", is_formed=shlex.split, is_hidden=True),
        "Program that writes keys of sealed frames, run every minute without a shell; empty: no program.",
        is_private=True,
    )
    keys: PrivateText = setting(
        PrivateText(), HiddenKeys(), "The keys themselves. Prefer a file, a command or the environment to a flag."
    )
    tenant: str = setting(
        "",
        FormedText(
            form="1 to 64 letters, digits, dots, underscores and hyphens, but not '-' alone",
            is_formed=TENANT.fullmatch,
            is_hidden=True,
        ),
        "Tenant of the engine. It shares no KV with other tenants, and its own keys seal its KV; empty: none.",
    )

    def __post_init__(self) -> None:
        SettingsSection.__post_init__(self)  # with slots, dataclass makes a new class, in which a bare super() fails
        for choices in (("secret", "secret_file"), ("keys_file", "keys_command", "keys")):
            given = [f"store.{key}" for key in choices if getattr(self, key)]
            if len(given) > 1:
                raise ConfigError("are both set", setting=", ".join(given), allowed="one of them")

    @property
    def loss_notice(self) -> str:
        """Return what the engine's lossy class means for answers; empty without a class."""
        if self.loss == "none":
            return ""
        return (
            f"this engine stores KV with loss ({self.loss}): an answer that uses stored KV may differ from one without "
            "it; see docs/lossy.md"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig(SettingsSection):
    """Settings of concurrency and deadlines."""

    section: ClassVar[str] = "limits"

    stores_in_flight: int = setting(16, Count(1, 1024), "Concurrent gathers (engine to host).")
    scatters_in_flight: int = setting(16, Count(1, 1024), "Concurrent scatters (host to engine).")
    load_deadline_s: float = setting(
        30.0, Seconds(1e-2, 3600), "Deadline of a load; then the engine computes the rest."
    )
    store_deadline_s: float = setting(
        10.0, Seconds(0, 3600), "How long storing waits for free host memory; then the rest is dropped."
    )
    announced_wait_s: float = setting(
        5.0,
        Seconds(0, 3600),
        "How long a request waits for chunks that another engine has announced; never longer than computing them.",
    )
    retained_percent: int = setting(
        50, Count(0, 90), "Percentage of host memory that hints may retain; 0: hints retain nothing."
    )
    hint_percent: int = setting(
        25, Count(1, 90), "Percentage of host memory that one request's hints may retain, within retained_percent."
    )
    retain_s: float = setting(3600.0, Seconds(0, 86400), "Longest time that a hint retains KV in host memory.")
    open_deadline_s: float = setting(
        30.0, Seconds(1e-2, 3600), "How long the start waits for a tier; the tier can open later."
    )
    close_deadline_s: float = setting(30.0, Seconds(0, 3600), "Deadline for writing pending chunks at close.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig(SettingsSection):
    """Settings of the choice between loading and computing."""

    section: ClassVar[str] = "planner"

    enabled: bool = setting(
        default=True,
        kind=Switch(),
        help="Load only where it is faster than computing; false: load everything available.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig(SettingsSection):
    """Settings of recordings for `kvtier replay`. They contain the lengths, times and block identities of requests."""

    section: ClassVar[str] = "trace"

    path: Path | None = setting(None, Location(), "Directory for recordings of requests; none: no recording.")
    capacity_bytes: int = setting(2**30, Size(2**12), "Maximum bytes of recordings; then recording stops.")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig(SettingsSection):
    """Settings of the journal, which has a line for each request and for each object that a tier reads or writes."""

    section: ClassVar[str] = "journal"

    path: Path | None = setting(None, Location(), "Directory for journals of requests and objects; none: no journal.")
    capacity_bytes: int = setting(2**30, Size(2**12), "Maximum bytes of journals; then further lines are lost.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig(SettingsSection):
    """Settings for queries and commands that `kvtier cache` sends to a running engine."""

    section: ClassVar[str] = "control"

    socket: Path | None = setting(
        None,
        Location(),
        "Unix socket (mode 0600) on which the engine answers `kvtier cache`; {pid}: its process; none: no socket.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig(SettingsSection):
    """Settings for vLLM."""

    section: ClassVar[str] = "vllm"

    prefix_protection: bool = setting(
        default=True,
        kind=Switch(),
        help="Reorder vLLM's free blocks so that prefixes of waiting requests are evicted last; false: vLLM's order.",
    )
    sleep_frees_host: bool = setting(
        default=False,
        kind=Switch(),
        help="Return host memory to the system while vLLM sleeps. Chunks that no lower tier has are lost.",
    )
    allow_high_priority: bool = setting(
        default=False,
        kind=Switch(),
        help="Let requests retain KV with `priority` high, which outlasts all other hints; false: ignore it.",
    )
    weights_names: Literal["digest", "random"] = setting(
        "digest",
        ChoiceKind(("digest", "random")),
        "How to name weights that vLLM receives while it runs: by digest, or at once by random bytes, for this engine "
        "alone.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsConfig(SettingsSection):
    """Settings of KV events for routers, in vLLM."""

    section: ClassVar[str] = "events"

    shared_medium: str = setting(
        "STORAGE",
        FormedText(form="letters, digits, underscores and hyphens", is_formed=re.compile("[A-Za-z0-9_-]*").fullmatch),
        "Medium in events of tiers that several nodes share; empty: no events of these tiers.",
    )
    repeat_s: float = setting(
        300.0, Seconds(0, 86400), "How often all stored blocks are published again, for new routers; 0: never."
    )
    token_ids: bool = setting(
        default=False,
        kind=Switch(),
        help="Write chunks' token ids into sealed objects. After a start, publish events of the objects in tiers.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig(SettingsSection):
    """Settings for SGLang."""

    section: ClassVar[str] = "sglang"

    unsupported: Literal["refuse", "allow"] = setting(
        "refuse",
        ChoiceKind(("refuse", "allow")),
        "Untested releases of SGLang; allow: use them. Only the same release finds their KV.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(SettingsSection):
    """Settings of logging in vLLM. Elsewhere the host program configures logging."""

    section: ClassVar[str] = "log"

    level: Literal["engine", "debug", "info", "warning", "error"] = setting(
        "engine",
        ChoiceKind(("engine", "debug", "info", "warning", "error")),
        "Minimum level of kvtier's lines in vLLM's log; engine: the level of vLLM (VLLM_LOGGING_LEVEL).",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings. Other objects are constructed with single values from it, never with the whole object.

    Raises:
        ConfigError: two tiers have the same name, a shared tier has no configured secret, a sealing tier has no key, or
            a lossy codec is not that of the engine's class.
    """

    host: HostConfig = field(default_factory=HostConfig)
    tiers: tuple[TierSettings, ...] = ()
    """Lower tiers in lookup order."""
    store: StoreConfig = field(default_factory=StoreConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def codec_of(self, tier: TierSettings) -> str:
        """Return the name of the codec that encodes chunks in a tier."""
        named = tier.codec or self.store.codec
        return named if named != "auto" else "raw" if self.store.loss == "none" else self.store.loss

    def _check_codecs(self) -> None:
        loss = self.store.loss
        for name, codec in (
            ("store.codec", self.store.codec),
            *((f"{tier.label}.codec", tier.codec) for tier in self.tiers),
        ):
            if codec in codecs.lossy_names() and codec != loss:
                raise ConfigError(
                    f"is lossy, but store.loss is {loss}; set store.loss = {codec}, or use another codec",
                    setting=name,
                    value=codec,
                    allowed=", ".join([*codecs.names(), *({loss} - {"none"})]),
                )

    def __post_init__(self) -> None:
        refuse_equal_names([tier.name for tier in self.tiers], "Python")
        self._check_codecs()
        if self.store.secret is None and self.store.secret_file is None:
            for tier in self.tiers:
                if tier.seal == "on" and not (self.store.keys_file or self.store.keys_command or self.store.keys):
                    raise ConfigError(
                        f"there is no key; set store.keys_file, or {HOW_TO_SHARE}",
                        setting=f"{tier.label}.seal",
                        value="on",
                    )
                if registry.kind_of(tier).is_shared(tier):
                    raise ConfigError(
                        f"other nodes use {tier.label}, so they need the same secret; {HOW_TO_SHARE}",
                        setting="store.secret_file",
                    )


SECTIONS: dict[str, type[SettingsSection]] = {
    kind.section: kind
    for kind in (
        HostConfig,
        StoreConfig,
        LimitsConfig,
        PlannerConfig,
        TraceConfig,
        JournalConfig,
        EventsConfig,
        ControlConfig,
        VllmConfig,
        SglangConfig,
        LogConfig,
    )
}


def find_section(section: str, origin: str) -> type[SettingsSection]:
    """Return the section with this name.

    Raises:
        ConfigError: the section is unknown. The message lists the known ones and suggests the nearest.
    """
    if section not in SECTIONS:
        raise unknown("unknown section", section, [*SECTIONS, "tiers"], setting=section, origin=origin)
    return SECTIONS[section]


def find(section: type[SettingsSection], key: str, origin: str) -> Setting:
    """Return the setting `key` of `section`.

    Raises:
        ConfigError: the setting is unknown. The message lists the known ones and suggests the nearest.
    """
    known = {setting.key: setting for setting in settings(section)}
    if key not in known:
        raise unknown("unknown setting", key, list(known), setting=f"{section.section}.{key}", origin=origin)
    return known[key]


def value_of(config: Config, setting: Setting) -> object:
    """Return the value of `setting` in `config`."""
    label, _, name = setting.section.partition(".")
    if name:
        return getattr(next(tier for tier in config.tiers if tier.name == name), setting.key)
    return getattr(getattr(config, label), setting.key)


def all_settings(config: Config) -> Iterator[Setting]:
    """Yield the settings of every section and of each tier."""
    for section in SECTIONS:
        yield from getattr(config, section).settings()
        if section == "host":
            for tier in config.tiers:
                yield from tier.settings()
