"""Bytes of an element in each format, scales and zero points included.

A quantised format stores a scale (and perhaps a zero point) for every group of elements. A group never crosses a vector
(one head of K or V, or one latent), so a vector of 64 elements with groups of 128 has one group of 64.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from kvtier.errors import ConfigError

Role = Literal["kv", "latent", "compressed", "rope", "index"]
"""Kinds of vectors: a head of K or V; MLA's latent; a compressed latent; the rotary part beside a latent; an
indexer's key. Engines pack some formats differently for each."""

GROUP_MAX = 4096


@dataclass(frozen=True, slots=True)
class Encoding:
    """Storage of one vector."""

    bits: int
    group: int = 0
    """Elements that share a scale; 0 without scales in the cache (16-bit types, a scale per tensor)."""
    group_bytes: int = 0
    """Scale and zero point of a group."""
    padding: int = 0
    """Bytes of padding of a vector."""

    def vector_bytes(self, size: int) -> float:
        """Bytes of a vector of `size` elements."""
        groups = -(-size // self.group) if self.group else 0
        return size * self.bits / 8 + groups * self.group_bytes + (self.padding if size else 0)


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format of KV."""

    name: str
    description: str
    default: Encoding
    by_role: Mapping[Role, Encoding] = field(default_factory=lambda: MappingProxyType({}))

    def encoding(self, role: Role) -> Encoding:
        """Storage of vectors of kind `role`."""
        return self.by_role.get(role, self.default)

    def vector_bytes(self, role: Role, size: int) -> float:
        """Bytes of one vector of `size` elements and kind `role`."""
        return self.encoding(role).vector_bytes(size)

    def with_index(self, index: "Format") -> "Format":
        """This format, with the keys of indexers in the format `index`."""
        name, description = f"{self.name}, index {index.name}", f"{self.description}; index keys: {index.description}"
        by_role: dict[Role, Encoding] = {**self.by_role, "index": index.encoding("index")}
        return Format(name, description, self.default, MappingProxyType(by_role))


_SIXTEEN, _EIGHT = Encoding(16), Encoding(8)
_FP8_INDEX = Encoding(8, group=128, group_bytes=4)

NAMED: Mapping[str, Format] = MappingProxyType(
    {
        known.name: known
        for known in (
            Format("fp32", "32 bits", Encoding(32)),
            Format("bf16", "16 bits", _SIXTEEN),
            Format("fp16", "16 bits", _SIXTEEN),
            Format("fp8", "8 bits, a scale per tensor", _EIGHT),
            Format("int8", "8 bits, a scale per tensor", _EIGHT),
            Format("mxfp8", "8 bits, a 1-byte scale per 32 (OCP MX 1.0)", Encoding(8, 32, 1)),
            Format("mxfp4", "4 bits, a 1-byte scale per 32 (OCP MX 1.0)", Encoding(4, 32, 1)),
            Format("nvfp4", "4 bits, an fp8 scale per 16 (NVIDIA Blackwell)", Encoding(4, 16, 1)),
            Format("fp4", "4 bits and no scales: a lower bound", Encoding(4)),
            # The two packed layouts are FlashMLA's, as vLLM 0.32 describes them in v1/attention/backends/mla.
            Format(
                "fp8_ds_mla",
                "MLA latents in fp8 with scales, rotary part in 16 bits, index keys in fp8 (FlashMLA, vLLM)",
                _EIGHT,
                MappingProxyType(
                    {
                        "latent": Encoding(8, group=128, group_bytes=4),
                        "compressed": Encoding(8, group=64, group_bytes=1, padding=1),
                        "rope": _SIXTEEN,
                        "index": _FP8_INDEX,
                    }
                ),
            ),
            Format(
                "nvfp4_ds_mla",
                "MLA latents in nvfp4, rotary part in fp8, index keys in fp8 with scales (FlashMLA, vLLM)",
                Encoding(4, 16, 1),
                MappingProxyType({"latent": Encoding(4, 16, 1), "rope": _EIGHT, "index": _FP8_INDEX}),
            ),
        )
    }
)
"""Every format with a fixed name."""

ALIASES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}

ALLOWED = f"{', '.join(NAMED)}, int8:gN or int4:gN (groups of N elements; end with :sym or :asym)"

_GROUPED = re.compile(r"int(4|8):g([0-9]{1,5})(?::(sym|asym))?", re.ASCII)


def parse_dtype(name: str, origin: str = "dtype") -> Format:
    """The format `name`.

    By default ``int4:g64`` has a 16-bit scale and a 16-bit zero point per 64 elements, and ``int8:g64`` a scale alone.
    ``:sym`` (scale alone) and ``:asym`` (both) override the default.

    Raises:
        ConfigError: there is no such format; the message names `origin`.
    """
    plain = name.strip().lower()
    plain = ALIASES.get(plain, plain)
    if plain in NAMED:
        return NAMED[plain]
    found = _GROUPED.fullmatch(plain)
    if found is None or not 1 <= int(found[2]) <= GROUP_MAX:
        raise ConfigError(f"{origin}: unknown format {name!r}; known are {ALLOWED}, N from 1 to {GROUP_MAX}")
    bits, group = int(found[1]), int(found[2])
    is_symmetric = (found[3] or ("asym" if bits == 4 else "sym")) == "sym"
    description = f"{bits} bits, a 16-bit scale{'' if is_symmetric else ' and zero point'} per {group}"
    return Format(plain, description, Encoding(bits, group, 2 if is_symmetric else 4))
