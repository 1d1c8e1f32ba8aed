"""Lossy codecs for keys and values: integers of 4 to 7 bits with a scale for each group of numbers.

Channels differ greatly in magnitude, so a group is one channel of many tokens. Some tokens have much smaller or larger
values than others, and the small ones draw much attention. So their values are first scaled by a power of 2. A
prompt's first tokens also draw much attention, so they stay exact. FORMAT.md specifies the bytes.

Each number of a group is stored as (low + code * step) * scale. `low` and `step` are bf16. `low` is rounded down, so no
code is negative. Products of a code and `step` are exact in float32, so a fused multiply-add changes no result.
"""

import logging
import struct
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, described, install_hint
from kvtier.layout import ELEMENT_BYTES, Axes, Axis, Cut, Element, Loss, RunKind

logger = logging.getLogger(__name__)

EXACT_TOKENS = 4
"""Number of tokens at the start of a prompt that stay exact."""
BITS = MappingProxyType({"k8v4": (7, 5), "int4": (5, 4)})
"""Bits of a code for keys and for values, by codec. The names of the codecs stand for budgets of bytes."""
TOKEN_GROUPS = (256, 128)
"""Number of tokens of a channel that share a low and a step, in keys and in values."""
BLOCK_TOKENS = 8
"""Number of tokens whose codes are stored together."""
STEP_MIN = 2.0**-100
"""Smallest step. Its inverse is finite, and no product of it and a code is denormal."""
BIAS = 127
"""The exponent field of 1 in float32."""
SHIFT_MAX = 31
"""Largest magnitude of the exponent of a scale."""
OCTAVE = 1 << 23
"""Difference between the bits of a float32 number and of twice that number."""
SCALED = OCTAVE * 4 // 5
"""A token gets a scale if the bits of its largest magnitude differ from the median token's by at least this."""
USUAL = OCTAVE * 3 // 5
"""Largest difference from the median that a token may have if others are compared with it. Coding changes no such token
so much that its difference reaches `SCALED`."""
OTHERS = 32
"""Size of the aligned range in which a token is compared with other tokens, to recognize one that was coded before."""
COPIED = 4
"""A token counts as coded before if more than one in this many of its scaled numbers equals one of another token."""

_KERNELS = {"numba": "kvtier.codec.lossy_numba", "torch": "kvtier.codec.lossy_torch"}
"""Modules that implement `Kernels`, by the package that each requires; fastest first."""


TOLERANCES = MappingProxyType[Element, tuple[float, float]](
    {"bf16": (2.0**-8, 0), "fp16": (2.0**-11, 2.0**-25), "fp32": (2.0**-22, 0)}
)
"""Allowed error of a decoded number beyond half a step times its scale: a share of the original number, for
rounding to the element and arithmetic in float32, and an absolute difference, for rounding denormal numbers."""
HALF_STEP = 0.501
"""Allowed error as a share of a step. The excess over one half covers rounding in float32 and denormal bf16 numbers."""
Array = npt.NDArray[Any]

_HEAD = struct.Struct("<IHH")
_ORDER: tuple[Axis, ...] = ("side", "head", "page", "token", "channel")


class Side(NamedTuple):
    """The keys or the values of a section, and where they are stored."""

    bits: int
    token_group: int
    lows_at: int
    """The byte at which the lows start. They are sorted by head, group of tokens, and channel, as the steps are."""
    steps_at: int
    exponents_at: int
    """The byte at which the exponents of the tokens' scales start. Each takes one byte. Keys have no scales."""
    codes_at: int
    """The byte at which the codes start. They are stored by head and block. A block has `bits` rows, with one byte for
    each channel."""


class Form(NamedTuple):
    """The arrangement of a section in memory and in storage. Sizes are in numbers unless the name says otherwise."""

    element: Element
    axes: Axes
    heads: int
    tokens: int
    """Number of tokens that are coded."""
    exact_tokens: int
    """Number of tokens before the coded ones. They are stored unchanged."""
    channels: int
    sides: tuple[Side, ...]
    raw_bytes: int
    stored_bytes: int

    @property
    def blocks(self) -> int:
        """Number of blocks of codes in a head. The last block is padded with zeros."""
        return -(-self.tokens // BLOCK_TOKENS)

    @property
    def steps(self) -> tuple[int, ...]:
        """Distances between neighboring sides, heads, pages, and tokens of a page."""
        return tuple(self.axes.step(name) for name in _ORDER[:-1])

    def view(self, memory: memoryview) -> Array:
        """Return a section's numbers as integers, of shape (sides, heads, pages, tokens of a page, channels)."""
        names, sizes = self.axes.names, self.axes.sizes
        missing = [name for name in _ORDER if name not in names]
        order = [(*missing, *names).index(name) for name in _ORDER]
        numbers = np.frombuffer(memory, f"<u{ELEMENT_BYTES[self.element]}")
        return numbers.reshape((1,) * len(missing) + sizes).transpose(order)

    @property
    def exact(self) -> tuple[Any, ...]:
        """Index of the exact tokens in a `view`. It selects the shape (sides, heads, tokens, channels)."""
        return ..., *np.divmod(np.arange(self.exact_tokens), self.axes.size("token")), slice(None)

    def stored_exact(self, stored: memoryview) -> Array:
        """Return a stored section's exact tokens without a copy. The shape is (sides, heads, tokens, channels)."""
        place = stored[_HEAD.size : self.sides[0].lows_at]
        numbers = np.frombuffer(place, f"<u{ELEMENT_BYTES[self.element]}")
        return numbers.reshape(len(self.sides), self.heads, self.exact_tokens, self.channels)


class Kernels(Protocol):
    """An implementation of the codecs. All implementations return the same bits.

    They do not touch the stored bytes before the first side. The numbers that they decode for exact tokens are
    undefined.
    """

    def encode(self, raw: memoryview, stored: memoryview, form: Form) -> bool:
        """Code the numbers. Return False if a number is not finite, or a scale or a decoded number would not be."""
        ...

    def decode(self, stored: memoryview, into: memoryview, form: Form) -> None:
        """Restore the numbers of a section from its stored bytes."""
        ...

    def wrong(self, raw: memoryview, stored: memoryview, decoded: memoryview, form: Form) -> int:
        """Return how many numbers of `decoded` are farther from those of `raw` than `stored` allows."""
        ...


class Int4:
    """Codes keys in 5 bits and values in 4."""

    name: str = "int4"
    id: int = 5
    is_exact: bool = False

    def __init__(self, package: str = "") -> None:
        """Use the kernels of `package`, or the fastest that are installed.

        Raises:
            ConfigError: `package` is not installed, or neither numba nor torch is.
        """
        _installed(package)  # only encoding and decoding import the package
        self._package = package

    def encode(self, raw: memoryview, into: memoryview, cut: Cut, *, is_first: bool) -> int:
        """Code `raw` into the front of `into`. Return `len(raw)` if it cannot be coded or would not shrink."""
        form = self._form(cut, EXACT_TOKENS if is_first else 0)
        if form is None:
            return len(raw)
        stored = into[: form.stored_bytes]
        _HEAD.pack_into(stored, 0, form.raw_bytes, form.exact_tokens, 0)
        if form.exact_tokens:
            form.stored_exact(stored)[:] = form.view(raw)[form.exact]
        return form.stored_bytes if load_kernels(self._package).encode(raw, stored, form) else len(raw)

    def decode(self, stored: memoryview, into: memoryview, cut: Cut) -> None:
        """Restore the section.

        Raises:
            ValueError: `stored` is damaged, or belongs to a section of another size.
        """
        form = self._stored_form(stored, len(into), cut)
        load_kernels(self._package).decode(stored, into, form)
        if form.exact_tokens:
            form.view(into)[form.exact] = form.stored_exact(stored)

    def error(self, raw: memoryview, stored: memoryview, decoded: memoryview, cut: Cut) -> str:
        """Explain how numbers exceed the allowed error: half a step of their group, plus rounding to the element."""
        form = self._stored_form(stored, len(raw), cut)
        wrong = load_kernels(self._package).wrong(raw, stored, decoded, form)
        exact = form.stored_exact(stored)
        wrong += sum(np.count_nonzero(form.view(it)[form.exact] != exact) for it in (raw, decoded))
        return f"{wrong} numbers differ by more than their group's step allows" if wrong else ""

    def _stored_form(self, stored: memoryview, raw_bytes: int, cut: Cut) -> Form:
        if len(stored) < _HEAD.size:
            raise ValueError(f"{len(stored)} bytes are too few for a section's fields")
        size, exact_tokens, zeros = _HEAD.unpack_from(stored)
        form = self._form(cut, exact_tokens) if exact_tokens in {0, EXACT_TOKENS} else None
        if (
            form is None
            or zeros
            or size != raw_bytes
            or raw_bytes != form.raw_bytes
            or len(stored) != form.stored_bytes
        ):
            raise ValueError(
                f"{len(stored)} bytes with {exact_tokens} exact tokens cannot fill {raw_bytes} of {cut.element}"
            )
        return form

    def _form(self, cut: Cut, exact_tokens: int) -> Form | None:
        return None if cut.axes is None else _form(cut.axes, cut.kind, cut.element, self.name, exact_tokens)


class K8V4(Int4):
    """Codes keys in 7 bits and values in 5. It takes no more bytes than 8 and 4 bits would."""

    name: str = "k8v4"
    id: int = 4


@cache
def load_kernels(package: str = "") -> Kernels:
    """Return the kernels of `package`, or the fastest that can be loaded. The first call may compile for seconds.

    Raises:
        ConfigError: neither numba nor torch is installed, or neither can be loaded.
    """
    for name in _installed(package):
        try:
            return cast("Kernels", import_module(_KERNELS[name]))
        except Exception as error:  # noqa: BLE001 - such as a numba that does not support this NumPy
            logger.warning("lossy codecs cannot use the package %s: %s", name, described(error))
    raise ConfigError(f"lossy codecs can load neither numba nor torch (see the log): {install_hint('lossy')}")


def _installed(wanted: str = "") -> list[str]:
    found = [package for package in _KERNELS if wanted in {"", package} and find_spec(package)]
    if not found:
        raise ConfigError(f"lossy codecs need the package numba, or torch, which is slower: {install_hint('lossy')}")
    return found


def share_of(loss: Loss, kind: RunKind, element: Element, tokens: int, channels: int) -> float:
    """Return the stored bytes of one head's keys or values as a share of the raw ones, without exact tokens."""
    form = _form(Axes(("head", "token", "channel"), (1, tokens, channels)), kind, element, loss, 0)
    return 1.0 if form is None else (form.stored_bytes - _HEAD.size) / form.raw_bytes


@lru_cache(256)
def _form(axes: Axes, kind: RunKind, element: Element, codec: str, exact_tokens: int) -> Form | None:
    """Return the form of a section; None if it cannot be coded or would not shrink."""
    heads, channels, width = axes.size("head"), axes.size("channel"), ELEMENT_BYTES[element]
    tokens = axes.tokens - exact_tokens
    if tokens < 1:
        return None
    kinds = ("keys", "values")[: axes.size("side")] if kind == "kv" else (kind,)
    position = _HEAD.size + len(kinds) * heads * exact_tokens * channels * width
    sides: list[Side] = []
    for it in kinds:
        bits, token_group = BITS[codec][it == "values"], TOKEN_GROUPS[it == "values"]
        steps_at = position + 2 * heads * -(-tokens // token_group) * channels
        exponents_at = 2 * steps_at - position
        codes_at = exponents_at + (tokens if it == "values" else 0)
        sides.append(Side(bits, token_group, position, steps_at, exponents_at, codes_at))
        position = codes_at + heads * -(-tokens // BLOCK_TOKENS) * bits * channels
    raw_bytes = len(kinds) * heads * axes.tokens * channels * width
    form = Form(element, axes, heads, tokens, exact_tokens, channels, tuple(sides), raw_bytes, position)
    return form if position < raw_bytes else None
