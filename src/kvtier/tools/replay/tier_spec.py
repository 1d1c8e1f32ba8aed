"""Reads tiers and prefill speeds from the command line. Each figure keeps its source.

A figure comes from the option itself, or else from a part of the hardware catalogue, a probe's record, or a default.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.config.tier_list import HOST, SettingOrigin, describe
from kvtier.config.value_types import parse_size, shown_place, within
from kvtier.errors import ConfigError
from kvtier.tools import size
from kvtier.tools.plan.hardware import HardwareItem, fastest, find, read_links, round_trip, split_count
from kvtier.tools.plan.inputs import DiskInputs, GpuInputs, SoftwareInputs
from kvtier.tools.plan.model_cost import model_cost
from kvtier.tools.replay.results import PrefillSpeed, TierSpec

_FILLED = DiskInputs().filled
"""Share of its drives that a tier fills, as in `kvtier plan`."""
_FLOPS_SHARE = GpuInputs().flops_share
_LINK_SHARE = SoftwareInputs().link_share
"""Usable share of the bandwidth that a data sheet gives for a GPU's link, as in `kvtier plan`."""
_BANDWIDTHS = {
    "drive": ("read_bytes_per_s", "write_bytes_per_s"),
    "gpu": ("link_bytes_per_s", "link_bytes_per_s"),
}
"""The catalogue's fields for reads and for writes, by kind of part."""
_PROBED: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "host": (("gpu", "to_gpu", "from_gpu"), ("host", "copy", "copy")),
    "disk": (("disk", "read", "write"), ("directory", "read", "write")),
    "directory": (("directory", "read", "write"),),
}
"""For each tier, the links in a probe's record that show its speed, best first, as (link, operation to read, operation
to write). The link of any other tier has the tier's name."""


class TierSpeed(NamedTuple):
    """Speed of a tier. None means unknown."""

    read_bytes_per_s: float | None
    write_bytes_per_s: float | None
    latency_s: float | None
    source: str

    def times(self, drives: int) -> "TierSpeed":
        """Return the speed of `drives` drives together. The latency is that of one drive."""
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
    """A number of identical hardware parts from the catalogue."""

    number: int
    item: HardwareItem

    @property
    def source(self) -> str:
        """The source of the figures, for messages and tables."""
        return f"catalogue: {self.number} x {self.item.name} ({self.item.source}, {self.item.date})"

    @property
    def capacity_bytes(self) -> int | None:
        """Capacity of all drives together; None for parts without a capacity."""
        each = self.item.values.get("capacity_bytes")
        return None if each is None else self.number * int(each)

    @property
    def speed(self) -> TierSpeed:
        """The speed of all parts together. For GPUs, it is that of their links to the host."""
        share = _LINK_SHARE if self.item.kind == "gpu" else 1.0
        note = "" if share == 1 else f", {share:.0%} of it"
        read, write = (self.number * share * float(self.item.values[name]) for name in _BANDWIDTHS[self.item.kind])
        return TierSpeed(read, write, None, self.source + note)


def find_parts(text: str, option: str, kind: str) -> Parts:
    """Find the parts that ``pm1753`` or ``4xpm1753`` names. Case is ignored, and underscores count as hyphens.

    Args:
        text: number and name.
        option: name of the option, for messages.
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
        """Return a tier's speed, or `UNKNOWN` if its link was not measured.

        The latency of a remote tier is that of a round trip.
        """
        for link, read, write in _PROBED.get(tier, ((tier, "read", "write"),)):
            read_bytes_per_s = fastest(self._links, link, read)
            if read_bytes_per_s is not None:
                # The latency is the time of the smallest single operation minus the time of its bytes at full speed.
                least = min((it for it in self._links[link] if it.op == read), key=lambda it: (it.depth, it.size_bytes))
                latency_s = max(0.0, least.first_s - least.size_bytes / read_bytes_per_s)
                if is_remote:
                    latency_s = round_trip(self._links, link) or latency_s
                source = f"probe {self._path}: {link}, best of its sizes and depths"
                return TierSpeed(read_bytes_per_s, fastest(self._links, link, write), latency_s, source)
        return UNKNOWN


def parse_tier(text: str, *, probe: ProbedSpeeds | None = None, gpu: Parts | None = None) -> TierSpec:
    """Parse a tier in the form of every `--tier` option (`config.tier_list`), such as ``disk=4TiB?read=12GB/s``.

    Drives are from the catalogue, with their speed (``disk=4xpm1753``), or of any make (``disk=4x7.68TB``). A measured
    or default speed applies to each drive, unless the tier is remote. All nodes share a tier of a remote kind.

    Args:
        text: the tier.
        probe: measured speeds.
        gpu: the GPUs of a node, for the speed of host memory.

    Raises:
        ConfigError: the text is malformed, or names a part that is not in the catalogue.
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
    if tier.capacity_bytes is None:
        sources["capacity_bytes"] = f"{_FILLED:.0%} of {parts.source if parts else '--tier'}"
    for field in ("read_bytes_per_s", "write_bytes_per_s", "latency_s"):
        best = next(it for it in known if getattr(it, field) is not None)
        speeds[field], sources[field] = getattr(best, field), best.source
    return TierSpec(
        name=tier.name,
        capacity_bytes=int((drive_bytes or 0) * _FILLED) if tier.capacity_bytes is None else tier.capacity_bytes,
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
    """Return the prefill speed of a single prompt.

    Args:
        model: as in `kvtier size`. Its attention determines how the cost grows with the position of a token.
        tokens_per_s: speed for the first tokens; None means the speed of the GPUs, or the default.
        gpu: GPUs that compute one prompt together. They reach the share of their bf16 peak that `kvtier plan` assumes.
            The time to exchange data between them is not counted.

    Raises:
        ConfigError: GPUs are given without a speed, and the model's number of parameters is unknown.
    """
    sized = size.of(model)
    active = sized.model.active_billion or sized.model.parameters_billion
    default = PrefillSpeed()
    if active is None:
        if gpu is not None and tokens_per_s is None:
            raise ConfigError(f"--gpu: the number of parameters of {model} is not known; give --prefill, too")
        source = default.source if tokens_per_s is None else "--prefill; attention as of a 70B dense model"
        return PrefillSpeed(tokens_per_s=default.tokens_per_s if tokens_per_s is None else tokens_per_s, source=source)
    flop = 2e9 * active
    share = GpuInputs().expert_flops_share if sized.model.experts[0] > 1 else _FLOPS_SHARE
    source = "--prefill"
    if tokens_per_s is None and gpu is not None:
        tokens_per_s = gpu.number * float(gpu.item.values["flops"]["bf16"]) * share / flop
        source = f"{gpu.source}, {share:.0%} of their bf16 peak"
    elif tokens_per_s is None:
        tokens_per_s, source = default.tokens_per_s, default.source
    attention = model_cost(sized).attention
    flop *= _FLOPS_SHARE / share  # attention has no experts
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
