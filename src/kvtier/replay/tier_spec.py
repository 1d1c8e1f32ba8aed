"""Tiers and prefill speeds from the command line; each figure keeps its source.

A figure comes from the option itself, else a part of the hardware catalogue, a probe's record, or a default.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvtier import size
from kvtier.config.tier_list import HOST, SettingOrigin, describe
from kvtier.config.value_types import parse_size, shown_place, within
from kvtier.errors import ConfigError
from kvtier.plan.hardware import HardwareItem, find, split_count
from kvtier.plan.inputs import GpuInputs, SoftwareInputs
from kvtier.plan.model_cost import model_cost
from kvtier.plan.probe_record import fastest, read_links, round_trip
from kvtier.replay.prefill_speed import PrefillSpeed
from kvtier.replay.results import TierSpec

_FLOPS_SHARE = GpuInputs().flops_share
_LINK_SHARE = SoftwareInputs().link_share
"""Usable share of a data sheet's bandwidth of a GPU's link, as in `kvtier plan`."""
_BANDWIDTHS = {
    "drive": ("read_bytes_per_s", "write_bytes_per_s"),
    "gpu": ("link_bytes_per_s", "link_bytes_per_s"),
}
"""Fields of the catalogue by kind of part: reads, writes."""
_PROBED: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "host": (("gpu", "to_gpu", "from_gpu"), ("host", "copy", "copy")),
    "disk": (("disk", "read", "write"), ("directory", "read", "write")),
    "directory": (("directory", "read", "write"),),
}
"""Tier to links of a probe, the best first: link, operation to read, operation to write. The link of any other tier has
its name."""


class TierSpeed(NamedTuple):
    """Speed of a tier; None: unknown."""

    read_bytes_per_s: float | None
    write_bytes_per_s: float | None
    latency_s: float | None
    source: str

    def times(self, drives: int) -> "TierSpeed":
        """Speed of several drives together; the latency is that of one."""
        if drives == 1:
            return self
        read, write = (None if it is None else drives * it for it in (self.read_bytes_per_s, self.write_bytes_per_s))
        return TierSpeed(read, write, self.latency_s, f"{drives} x {self.source}")


UNKNOWN = TierSpeed(None, None, None, "")
DEFAULTS: dict[str, TierSpeed] = {
    "host": TierSpeed(25e9, 25e9, 20e-6, "default: half of PCIe 5 x16"),
    "disk": TierSpeed(12e9, 6e9, 100e-6, "default: one PCIe 5 drive"),
}
OTHERS = TierSpeed(5e9, 5e9, 1e-3, "default")


class Parts(NamedTuple):
    """A number of equal parts of the catalogue."""

    number: int
    item: HardwareItem

    @property
    def source(self) -> str:
        """Source of the figures, for messages and tables."""
        return f"catalogue: {self.number} x {self.item.name} ({self.item.source}, {self.item.date})"

    @property
    def capacity_bytes(self) -> int | None:
        """Capacity of all drives together; None for parts without one."""
        each = self.item.values.get("capacity_bytes")
        return None if each is None else self.number * int(each)

    @property
    def speed(self) -> TierSpeed:
        """Speed of all parts together; for a GPU, of its link to the host."""
        share = _LINK_SHARE if self.item.kind == "gpu" else 1.0
        note = "" if share == 1 else f", {share:.0%} of it"
        read, write = (self.number * share * float(self.item.values[name]) for name in _BANDWIDTHS[self.item.kind])
        return TierSpeed(read, write, None, self.source + note)


def find_parts(text: str, option: str, kind: str) -> Parts:
    """The parts of ``pm1753`` or ``4xpm1753``; case and underscores do not matter.

    Args:
        text: number and name.
        option: for messages.
        kind: ``gpu`` or ``drive``.

    Raises:
        ConfigError: the catalogue has no such part of this kind.
    """
    number, name = split_count(text, option)
    return Parts(number or 1, find(kind, name, option))


class ProbedSpeeds:
    """Speeds of tiers from a record of `kvtier probe --record`.

    Raises:
        ConfigError: the record cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._links = read_links(path, "--probe")

    def speed(self, tier: str, *, is_remote: bool = False) -> TierSpeed:
        """Speed of a tier; unknown if its link was not measured. The latency of a remote one is that of an answer."""
        for link, read, write in _PROBED.get(tier, ((tier, "read", "write"),)):
            read_bytes_per_s = fastest(self._links, link, read)
            if read_bytes_per_s is not None:
                # Time of the smallest single operation beyond its bytes at full speed.
                least = min((it for it in self._links[link] if it.op == read), key=lambda it: (it.depth, it.size_bytes))
                latency_s = max(0.0, least.first_s - least.size_bytes / read_bytes_per_s)
                if is_remote:
                    latency_s = round_trip(self._links, link) or latency_s
                source = f"probe {self._path}: {link}, best of its sizes and depths"
                return TierSpeed(read_bytes_per_s, fastest(self._links, link, write), latency_s, source)
        return UNKNOWN


def parse_tier(text: str, *, probe: ProbedSpeeds | None = None, gpu: Parts | None = None) -> TierSpec:
    """A tier of the text that every `--tier` takes (`config.tier_list`), such as ``disk=4TiB?read=12GB/s``.

    Drives are ``disk=4xpm1753`` of the catalogue, with their speed, or ``disk=4x7.68TB`` of any make. A measured
    or default speed is that of each drive, unless the tier is remote. A tier of a remote kind is shared by all nodes.

    Args:
        text: the tier.
        probe: measured speeds.
        gpu: the GPUs of a node, for the speed of host memory.

    Raises:
        ConfigError: it is malformed, or names a part that the catalogue does not have.
    """
    tier = describe(text, SettingOrigin("", "--tier"))
    source = f"--tier {shown_place(text)!r}"
    drives, parts, drive_bytes = 1, None, None
    if tier.drives is not None:
        number, each = split_count(tier.drives, source)
        drives = 1 if number is None or tier.is_remote else number
        if each[:1].isdigit():
            drive_bytes = (number or 1) * _bytes(source, each)
        else:
            parts = find_parts(tier.drives, source, "drive")
            drive_bytes = parts.capacity_bytes
    known = [
        TierSpeed(tier.read_bytes_per_s, tier.write_bytes_per_s, tier.latency_s, "--tier"),
        parts.speed if parts else UNKNOWN,
        probe.speed(tier.name, is_remote=tier.is_remote).times(drives) if probe else UNKNOWN,
        gpu.speed if gpu and tier.kind == HOST else UNKNOWN,
        DEFAULTS.get(tier.kind, OTHERS).times(drives),
    ]
    speeds: dict[str, Any] = {}
    sources = {"capacity_bytes": f"default of {tier.kind}" if tier.is_default else "--tier"}
    if tier.capacity_bytes is None and parts is not None:
        sources["capacity_bytes"] = parts.source
    for field in ("read_bytes_per_s", "write_bytes_per_s", "latency_s"):
        best = next(it for it in known if getattr(it, field) is not None)
        speeds[field], sources[field] = getattr(best, field), best.source
    return TierSpec(
        name=tier.name,
        capacity_bytes=(drive_bytes or 0) if tier.capacity_bytes is None else tier.capacity_bytes,
        is_shared=tier.is_remote,
        is_remote=tier.is_remote,
        drive_bytes=drive_bytes,
        rated_writes_per_day=parts.item.values.get("drive_writes_per_day") if parts else None,
        sources=sources,
        **speeds,
    )


def _bytes(option: str, text: str) -> int:
    try:
        return within(parse_size(text), 1, 2**70)
    except ValueError as error:
        raise ConfigError(f"{option}: {text!r} is {error}; allowed: a size such as 64GiB, 7.68TB or 25GB") from None


def prefill_of(model: str, *, tokens_per_s: float | None = None, gpu: Parts | None = None) -> PrefillSpeed:
    """The prefill speed of one prompt.

    Args:
        model: as in `kvtier size`; its attention determines how the cost grows with the position of a token.
        tokens_per_s: speed for the first tokens; None: from the GPUs, or the default.
        gpu: GPUs that compute one prompt together, at half their bf16 peak, and exchange nothing.

    Raises:
        ConfigError: GPUs are given, and the model's number of parameters is unknown.
    """
    sized = size.of(model)
    active = sized.model.active_billion or sized.model.parameters_billion
    default = PrefillSpeed()
    if active is None:
        if gpu is not None and tokens_per_s is None:
            raise ConfigError(f"--gpu: the number of parameters of {model} is not known; allowed: --prefill with it")
        source = default.source if tokens_per_s is None else "--prefill; attention as of a 70B dense model"
        return PrefillSpeed(tokens_per_s=default.tokens_per_s if tokens_per_s is None else tokens_per_s, source=source)
    flop = 2e9 * active
    source = "--prefill"
    if tokens_per_s is None and gpu is not None:
        tokens_per_s = gpu.number * float(gpu.item.values["flops"]["bf16"]) * _FLOPS_SHARE / flop
        source = f"{gpu.source}, {_FLOPS_SHARE:.0%} of their bf16 peak"
    elif tokens_per_s is None:
        tokens_per_s, source = default.tokens_per_s, default.source
    attention = model_cost(sized).attention
    full = sum(it.layers * it.flop_per_pair for it in attention if it.window_tokens is None)
    windows = tuple(
        (it.window_tokens, flop / (it.layers * it.flop_per_pair))
        for it in attention
        if it.window_tokens is not None and it.flop_per_pair
    )
    return PrefillSpeed(
        tokens_per_s=tokens_per_s,
        attention_tokens=flop / full if full else float("inf"),
        windows=windows,
        source=f"{source}; attention by the shape of {sized.model.name}",
    )
