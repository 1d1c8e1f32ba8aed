"""Numbers that name their own place, and a check that a layout's axes find each of them there."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.layout import Axes, Axis, Cut, GroupLayout

Numbers = npt.NDArray[np.int16]

ORDER: tuple[Axis, ...] = ("side", "head", "page", "token", "channel")


def numbered(layers: int, heads: int, tokens: int, channels: int) -> Numbers:
    """Return different numbers of 16 bits: [side, layer, head, token, channel]."""
    shape = (2, layers, heads, tokens, channels)
    assert np.prod(shape) < 1 << 16
    return np.arange(np.prod(shape), dtype=np.uint16).astype(np.int16).reshape(shape)


def section_of(payload: Any, cut: Cut) -> npt.NDArray[np.uint16]:
    """Return a section as its axes arrange it: [side, head, token, channel]."""
    assert cut.axes is not None
    names, sizes = cut.axes.names, cut.axes.sizes
    missing = tuple(name for name in ORDER if name not in names)
    raw = np.frombuffer(payload, np.uint16, cut.size_bytes // 2, cut.offset).reshape((1,) * len(missing) + sizes)
    five = raw.transpose([(missing + names).index(name) for name in ORDER])
    sides, heads, _, _, channels = five.shape
    return five.reshape(sides, heads, cut.axes.tokens, channels)


def check_axes(
    group: GroupLayout, payload: Any, numbers: Numbers, start: int = 0, value_channels: int | None = None
) -> None:
    """Assert that the sections of a group of a class hold each number once, and where the axes say.

    Args:
        group: its numbers have 16 bits.
        payload: what the engine's copier gathered from a cache that holds `numbers`.
        numbers: what `numbered` returned.
        start: the chunk's first token in `numbers`.
        value_channels: channels of values; None: as many as keys have.
    """
    seen: list[npt.NDArray[np.uint16]] = []
    for cut in group.sections:
        section = section_of(payload, cut)
        side, layer, head, token, channel = np.unravel_index(section.astype(np.int64), numbers.shape)
        assert (channel == np.arange(section.shape[3])).all(), f"channels of {cut}"
        assert (token == start + cut.first_token + np.arange(section.shape[2])[:, None]).all(), f"tokens of {cut}"
        sides = {"keys": [0], "values": [1], "kv": [0, 1]}[cut.kind]
        assert (side == np.array(sides)[:, None, None, None]).all(), f"sides of {cut}"
        owner = layer * numbers.shape[2] + head
        assert (owner == owner[:, :, :1, :1]).all(), f"heads of {cut}"
        seen.append(section.ravel())
    keys, values = numbers[:, :, :, start : start + group.chunk_tokens].view(np.uint16)
    expected = np.concatenate([keys.ravel(), values[..., :value_channels].ravel()])
    assert np.array_equal(np.sort(np.concatenate(seen)), np.sort(expected))


def misread(group: GroupLayout, first: Axis, second: Axis) -> GroupLayout:
    """Return the group with two dimensions of its axes taken for each other."""
    swapped = {first: second, second: first}
    axes = tuple(
        tuple(it and Axes(tuple(swapped.get(name, name) for name in it.names), it.sizes, it.kind) for it in layer)
        for layer in group.axes
    )
    return replace(group, axes=axes)
