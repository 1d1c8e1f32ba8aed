"""The known codecs. To add one, add a line to `_BUILT_IN`, or an entry point of `kvtier.codecs` in another package.

An entry point names a class whose constructor takes no arguments. Its `name` must be that of the entry point, its
`is_exact` True, and its id unique. Ids below 32,768 are reserved for kvtier. All lossy codecs are kvtier's own, because
each defines a class of engines (`store.loss`).
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from kvtier.codec.base import Codec, LossyCodec
from kvtier.errors import ConfigError, check_interface, described
from kvtier.layout import Loss

ENTRY_POINTS = "kvtier.codecs"
CLASS_VERSION = 1
"""Version of the lossy classes of engines. It must rise when a lossy codec stores or restores other numbers than
before."""

OUTSIDE_ID_MIN = 1 << 15
OUTSIDE_ID_MAX = (1 << 32) - 1

_BUILT_IN: dict[str, tuple[int, str, str]] = {
    # name: (id, module, class); a module is imported on first use
    "raw": (0, "kvtier.codec.raw", "Raw"),
    "zstd": (1, "kvtier.codec.zstd", "Zstd"),
    "split": (2, "kvtier.codec.split", "Split"),
    "split2": (3, "kvtier.codec.split", "Split2"),
}

_LOSSY: dict[str, tuple[int, str, str]] = {
    "k8v4": (4, "kvtier.codec.lossy", "K8V4"),
    "int4": (5, "kvtier.codec.lossy", "Int4"),
}


def lossy_names() -> list[str]:
    """Return the names of the lossy codecs."""
    return [*_LOSSY]


def class_of(loss: Loss) -> dict[str, object]:
    """Return what an engine's identity says about its class `loss`; empty for ``none``.

    The codec's id stands for all its parameters.
    """
    return {} if loss == "none" else {"codec": loss, "id": _LOSSY[loss][0], "version": CLASS_VERSION}


def coders(name: str) -> tuple[Codec, LossyCodec | None]:
    """Return the codecs that encode objects if a tier's codec is `name`: an exact one, and a lossy one or None.

    The exact codec encodes the sections that the lossy one cannot.

    Raises:
        ConfigError: as in `by_name`.
    """
    return (by_name("split"), lossy(name)) if name in lossy_names() else (by_name(name), None)


@cache
def lossy(name: str) -> LossyCodec:
    """Return the lossy codec `name`. All callers share one instance.

    Raises:
        KeyError: no lossy codec has this name.
    """
    _, module, attribute = _LOSSY[name]
    return cast("LossyCodec", getattr(import_module(module), attribute)())


def own_name(number: int) -> str:
    """Return the name of kvtier's own codec with this id in stored frames, or ``""`` for other ids. Import no codec."""
    return next((name for name, (known, _, _) in (*_BUILT_IN.items(), *_LOSSY.items()) if known == number), "")


def names() -> list[str]:
    """Return the names of all known exact codecs, including those whose packages are missing."""
    return [*_BUILT_IN, *sorted(_outside_points())]


@cache
def by_name(name: str) -> Codec:
    """Return the codec `name` with default settings. All callers share one instance.

    Raises:
        ConfigError: the codec is unknown or not exact, its package is missing, or another codec has its id.
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
                f"codecs {name!r} ({point.value}) and {other!r} have the same id, {codec.id}; remove one of them"
            )
    return codec


@cache
def by_id(number: int) -> Codec | LossyCodec:
    """Return the codec that has this id in stored frames.

    Raises:
        ConfigError: as in `by_name`.
    """
    if name := own_name(number):
        return lossy(name) if name in lossy_names() else by_name(name)
    for name in _outside_points():
        with suppress(ConfigError):  # a broken codec must not hide the others
            codec = by_name(name)
            if codec.id == number:
                return codec
    raise ConfigError(f"unknown codec id {number}; known: {', '.join(names())}. Install the package that provides it")


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
    """Return the codec's id; None if the codec cannot be used."""
    try:
        return _made(point).id
    except ConfigError:
        return None
