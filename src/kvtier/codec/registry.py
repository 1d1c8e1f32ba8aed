"""The known codecs. To add one, add a line to `_BUILT_IN`, or an entry point of `kvtier.codecs` in another package.

An entry point names a class without constructor arguments; its `name` must be the entry point's, its `is_exact` True,
and its id no other codec's. Ids below 32,768 are reserved for kvtier.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from kvtier.codec.base import Codec
from kvtier.errors import ConfigError, check_interface, described

ENTRY_POINTS = "kvtier.codecs"
OUTSIDE_ID_MIN = 1 << 15
OUTSIDE_ID_MAX = (1 << 32) - 1

_BUILT_IN: dict[str, tuple[int, str, str]] = {
    # name: (id, module, class); a module is imported on first use
    "raw": (0, "kvtier.codec.raw", "Raw"),
    "zstd": (1, "kvtier.codec.zstd", "Zstd"),
    "split": (2, "kvtier.codec.split", "Split"),
    "split2": (3, "kvtier.codec.split", "Split2"),
}


def names() -> list[str]:
    """Names of all known codecs, including those whose packages are missing."""
    return [*_BUILT_IN, *sorted(_outside_points())]


@cache
def by_name(name: str) -> Codec:
    """The codec `name` with default settings; one instance for all callers.

    Raises:
        ConfigError: the codec is unknown or not exact, its package is missing, or another one has the same id.
    """
    if name in _BUILT_IN:
        _, module, attribute = _BUILT_IN[name]
        return cast("Codec", getattr(import_module(module), attribute)())
    point = _outside_points().get(name)
    if point is None:
        raise ConfigError(f"unknown codec {name!r}; allowed: {', '.join(names())}")
    codec = _made(point)
    for other, its_point in _outside_points().items():
        if other != name and _id_of(its_point) == codec.id:
            raise ConfigError(
                f"codecs {name!r} ({point.value}) and {other!r} have the same id, {codec.id}; allowed: one"
            )
    return codec


@cache
def by_id(number: int) -> Codec:
    """The codec with this id in a stored frame.

    Raises:
        ConfigError: as in `by_name`.
    """
    for name, (known, _, _) in _BUILT_IN.items():
        if known == number:
            return by_name(name)
    for name in _outside_points():
        with suppress(ConfigError):  # a broken codec must not hide the others
            codec = by_name(name)
            if codec.id == number:
                return codec
    raise ConfigError(f"unknown codec id {number}; known: {', '.join(names())}. Install the package that brings it")


@cache
def _outside_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in _BUILT_IN}


@cache
def _made(point: EntryPoint) -> Codec:
    try:
        codec = cast("Callable[[], Codec]", point.load())()
        is_exact: object = getattr(codec, "is_exact", None)
        is_ours = OUTSIDE_ID_MIN <= codec.id <= OUTSIDE_ID_MAX and codec.name == point.name
    except Exception as error:
        raise ConfigError(f"codec {point.name!r} ({point.value}) cannot be loaded: {described(error)}") from error
    if not is_ours:
        raise ConfigError(
            f"codec {point.name!r} ({point.value}) must have that name and an id in "
            f"{OUTSIDE_ID_MIN}..{OUTSIDE_ID_MAX}, got {codec.name!r} and {codec.id}"
        )
    if is_exact is not True:
        raise ConfigError(
            f"codec {point.name!r} ({point.value}) has is_exact {is_exact!r}; allowed: True, for a codec that restores "
            "every byte"
        )
    check_interface(codec, Codec, f"codec {point.name!r} ({point.value})")
    return codec


def _id_of(point: EntryPoint) -> int | None:
    """None: the codec cannot be used."""
    try:
        return _made(point).id
    except ConfigError:
        return None
