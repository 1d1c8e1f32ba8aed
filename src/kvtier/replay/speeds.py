"""How fast links and prefills are: by a part of the catalogue, by a probe's record, or by default; each says which."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvtier import size
from kvtier.config.links import Links, fastest, read_links
from kvtier.config.schema import near
from kvtier.errors import ConfigError
from kvtier.plan.hardware import HardwareItem, catalogue
from kvtier.plan.inputs import GpuInputs, HostInputs, SoftwareInputs
from kvtier.plan.model_cost import model_cost
from kvtier.replay.cost import Prefill

_PART = re.compile(r"(?:([0-9]{1,6}) ?x ?)?(\S+)", re.ASCII)
_LINK_SHARE, _MEMORY_SHARE, _FLOPS_SHARE = SoftwareInputs().link_share, HostInputs().share, GpuInputs().flops_share
"""Of what a data sheet says, as `kvtier plan` has them."""
_PROBED: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "host": (("gpu", "to_gpu", "from_gpu"), ("host", "copy", "copy")),
    "disk": (("disk", "read", "write"), ("directory", "read", "write")),
    "directory": (("directory", "read", "write"),),
}
"""Tier to the links of a probe that tell its speed, the best first: link, operation to read, operation to write."""


class Speeds(NamedTuple):
    """Of a tier; what nobody says is None."""

    read_bytes_per_s: float | None
    write_bytes_per_s: float | None
    latency_s: float | None
    source: str


UNKNOWN = Speeds(None, None, None, "")
DEFAULTS: dict[str, Speeds] = {
    "host": Speeds(25e9, 25e9, 20e-6, "default: half of PCIe 5 x16"),
    "disk": Speeds(12e9, 6e9, 100e-6, "default: one PCIe 5 drive"),
}
OTHERS = Speeds(5e9, 5e9, 1e-3, "default")


class Part(NamedTuple):
    """So many of one item of the catalogue."""

    number: int
    item: HardwareItem

    @property
    def source(self) -> str:
        """Where its figures come from."""
        return f"catalogue: {self.number} x {self.item.name} ({self.item.source}, {self.item.date})"

    @property
    def capacity_bytes(self) -> int | None:
        """Of drives."""
        each = self.item.values.get("capacity_bytes")
        return None if each is None else self.number * int(each)

    @property
    def rated_writes_per_day(self) -> float | None:
        """Of drives."""
        return self.item.values.get("drive_writes_per_day")

    @property
    def speeds(self) -> Speeds:
        """Of all together; for a GPU, of its link to the host."""
        values = self.item.values
        read = write = 0.0
        share = 1.0
        if self.item.kind == "drive":
            read, write = float(values["read_bytes_per_s"]), float(values["write_bytes_per_s"])
        elif self.item.kind == "gpu":
            read = write = float(values["link_bytes_per_s"])
            share = _LINK_SHARE
        elif self.item.kind == "memory":
            read = write = float(values["channel_bytes_per_s"])
            share = _MEMORY_SHARE
        else:
            read = write = float(values["adapter_bytes_per_s"])
        told = "" if share == 1 else f", {share:.0%} of it"
        return Speeds(self.number * share * read, self.number * share * write, None, self.source + told)


def find_part(text: str, option: str, kind: str = "") -> Part:
    """The part of ``pm1753`` or ``4xpm1753``; upper and lower case and underscores make no difference.

    Args:
        text: how many, and its name.
        option: what named it, for messages.
        kind: gpu, drive, memory or network; empty allows all.

    Raises:
        ConfigError: there is none of that name, or it is of another kind.
    """
    found = _PART.fullmatch(text.strip())
    known = {name: item for of, items in catalogue().items() if kind in ("", of) for name, item in items.items()}
    name = found[2].lower().replace("_", "-") if found else text
    if name not in known:
        raise ConfigError(f"{option}: {text!r} is no {kind or 'part'} of the catalogue{near(name, sorted(known))}")
    number = int(found[1] or 1) if found else 1
    if not number:
        raise ConfigError(f"{option}: {text!r}; allowed: at least one")
    return Part(number, known[name])


class Probed:
    """What a probe's record says of tiers.

    Args:
        path: the record, from `kvtier probe --record`.

    Raises:
        ConfigError: it cannot be read, or is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._links = read_links(path, "--probe")

    def speeds(self, tier: str) -> Speeds:
        """Of the tier of that name; unknown where its link was not measured."""
        for link, read, write in _PROBED.get(tier, ()):
            read_bytes_per_s = fastest(self._links, link, read)
            if read_bytes_per_s is not None:
                write_bytes_per_s = fastest(self._links, link, write)
                latency_s = _latency_s(self._links, link, read, read_bytes_per_s)
                source = f"probe {self._path}: {link}, best of its sizes and depths"
                return Speeds(read_bytes_per_s, write_bytes_per_s, latency_s, source)
        return UNKNOWN


def _latency_s(links: Links, link: str, op: str, bytes_per_s: float) -> float:
    """What the smallest operation takes alone, less its bytes at full speed."""
    measures = [it for it in links[link] if it.op == op]
    least = min(measures, key=lambda it: (it.depth, it.size_bytes))
    return max(0.0, least.first_s - least.size_bytes / bytes_per_s)


def prefill_of(model: str, *, tokens_per_s: float | None = None, gpu: Part | None = None) -> Prefill:
    """How fast one prompt is computed.

    Args:
        model: as `kvtier size` knows it. Its shape tells how the cost of a token grows with the tokens before it.
        tokens_per_s: of the first tokens; None: by the GPUs, or the default.
        gpu: GPUs that compute one prompt together, at half their peak in bf16, as `kvtier plan` has it.

    Raises:
        ConfigError: GPUs are named, and the parameters of the model are not known.
    """
    sized = size.of(model)
    active = sized.model.active_billion or sized.model.parameters_billion
    default = Prefill()
    if active is None:
        if gpu is not None and tokens_per_s is None:
            raise ConfigError(f"--gpu: the number of parameters of {model} is not known; allowed: --prefill with it")
        source = default.source if tokens_per_s is None else "--prefill; attention as of a 70B dense model"
        return Prefill(tokens_per_s=tokens_per_s or default.tokens_per_s, source=source)
    flop = 2e9 * active
    source = "--prefill"
    if tokens_per_s is None:
        tokens_per_s, source = default.tokens_per_s, default.source
        if gpu is not None:
            tokens_per_s = gpu.number * float(gpu.item.values["flops"]["bf16"]) * _FLOPS_SHARE / flop
            source = f"{gpu.source}, {_FLOPS_SHARE:.0%} of their bf16 peak"
    runs = model_cost(sized).attention
    full = sum(it.layers * it.flop_per_pair for it in runs if it.window_tokens is None)
    windows = tuple(
        (it.window_tokens, flop / (it.layers * it.flop_per_pair))
        for it in runs
        if it.window_tokens is not None and it.flop_per_pair
    )
    return Prefill(
        tokens_per_s=tokens_per_s,
        attention_tokens=flop / full if full else float("inf"),
        windows=windows,
        source=f"{source}; attention by the shape of {sized.model.name}",
    )
