"""The known kinds of tier. A new kind needs a line in `_BUILT_IN` or, in another package, an entry point.

A kind is one module that defines a subclass of `TierSettings` and a `TierKind` named ``KIND``. An entry point of
`kvtier.tiers` refers to the `TierKind` object, and its name must be the kind's. Everything that handles tiers
(settings, ranks, adapters, probe, benchmarks, inspection, replay) asks this registry. A kind's module is imported when
the kind is first named.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, cast, get_args, get_origin

from kvtier.codec import registry as codecs
from kvtier.config.schema import Setting, SettingsSection, setting, settings, unknown
from kvtier.config.value_types import ChoiceKind, Count, Seconds, Size, Switch
from kvtier.errors import ConfigError, check_interface, described, install_hint, takes
from kvtier.layout import KvLayout
from kvtier.tier.base import RawClient, Tier
from kvtier.tier.store_view import StoreView

ENTRY_POINTS = "kvtier.tiers"

_BUILT_IN: dict[str, str] = {
    "directory": "kvtier.tier.directory.kind",
    "disk": "kvtier.tier.disk.kind",
    "mooncake": "kvtier.tier.mooncake.kind",
    "s3": "kvtier.tier.s3.kind",
    "shared_directory": "kvtier.tier.shared_directory.kind",
    "valkey": "kvtier.tier.valkey.kind",
}
"""The module of each kind."""

NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
NAME_LENGTH_MAX = 32
RESERVED = frozenset({"host", "gpu", "device", "engine"})
"""Places that are not tiers; metrics and reports name them next to the tiers."""

SMALL_BYTES_IN_FLIGHT = 16 << 20
"""Default of `small_bytes_in_flight` for every tier."""

S = TypeVar("S", bound="TierSettings")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings(SettingsSection):
    """Settings that every tier has. A kind's subclass adds its own, and may change defaults."""

    section: ClassVar[str] = "tiers"
    kind: ClassVar[str] = ""
    """Name of the kind."""

    name: str = ""
    """The tier's name in metrics, errors and settings, unique in a configuration; empty for the kind's name."""
    required: bool = setting(
        default=False,
        kind=Switch(),
        help="Refuse to start when the tier fails; false: start without it and open it later.",
    )
    loads_in_flight: int = setting(16, Count(1, 1024), "Concurrent promotions (tier to host).")
    writes_in_flight: int = setting(8, Count(1, 1024), "Concurrent demotions (host to tier).")
    small_bytes_in_flight: int = setting(
        SMALL_BYTES_IN_FLIGHT, Size(0), "Extra bytes in flight for small objects, in each direction."
    )
    read_threads: int = setting(4, Count(1, 256), "Threads that read objects.")
    write_threads: int = setting(2, Count(1, 256), "Threads that write objects.")
    probe_deadline_s: float = setting(0.5, Seconds(1e-3, 60), "How long a lookup waits for the tier's answer.")
    transfer_deadline_s: float = setting(10.0, Seconds(1e-2, 3600), "Time after which a read or write fails.")
    failures: int = setting(3, Count(1, 1000), "Consecutive failures that open the tier's circuit breaker.")
    seal: Literal["auto", "on", "off"] = setting(
        "auto",
        ChoiceKind(("auto", "on", "off")),
        "Encrypt and authenticate objects; auto: in tiers that other nodes use.",
    )
    codec: str = setting(
        "",
        ChoiceKind(lambda: ["", *codecs.names(), *codecs.lossy_names()]),
        "Encoding of chunks in the tier; empty: store.codec.",
    )
    retry_s: float = setting(5.0, Seconds(1e-2, 3600), "Delay before a trial of the tier; doubles up to a minute.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", checked_name(self.name or self.kind))
        SettingsSection.__post_init__(self)  # slots create a new class, for which super() without arguments fails

    @property
    def label(self) -> str:
        """The name of these settings in messages, ``tiers.NAME``."""
        return f"tiers.{self.name}"


class Problem(NamedTuple):
    """A setting that fails on this machine (error), does not work as expected (warning) or has a price (note)."""

    level: Literal["error", "warning", "note"]
    key: str
    """The setting, such as ``path``."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContext:
    """The values that a rank passes to a tier when it opens the tier."""

    layout: KvLayout
    """The rank's KV groups."""
    rank: int = 0
    ranks: int = 1
    model: bytes = bytes(16)
    """16 bytes that identify the model under the secret (`keys.secret.model_id`)."""
    key_id: bytes | None = None
    """16 bytes that identify the configured secret (`keys.secret.key_id`); None without one."""
    is_sealed: bool = False
    """Whether objects are sealed, so that no file of the tier may reveal conversations."""
    memory: tuple[memoryview, ...] = ()
    """The rank's host memory with its slots, one mapping per group. A tier may use it until the tier is closed."""
    clock: Callable[[], float] = time.monotonic

    def shared_key_id(self, tier: str) -> bytes:
        """Return `key_id`, which a store shared with other nodes requires.

        Raises:
            ConfigError: no secret is configured; the message names `tier`.
        """
        if self.key_id is None:
            raise ConfigError(f"the shared store of tier {tier!r} needs a secret; set it", setting="store.secret_file")
        return self.key_id


@dataclass(frozen=True, slots=True, kw_only=True)
class TierKind(Generic[S]):
    """A kind of tier, with everything that code outside its module knows about it."""

    name: str
    help: str
    """One sentence about the kind."""
    settings: type[S]
    where: str
    """The setting for ``WHERE`` in ``KIND:WHERE?key=value``, such as ``path``."""
    open: Callable[[S, TierContext], Tier]
    """Opens the tier of one rank.

    Raises:
        ConfigError: a mistake in the settings, which stops the start; never the store's contents.
        DamagedStoreError: the store cannot be used before an operator acts. The engine starts without it.
        TierError: the storage fails; it may open later.
    """
    persists: bool = True
    """Whether objects survive the process."""
    is_remote: bool = False
    """Whether a lookup costs a round trip, so that callers look up few names at a time."""
    is_shared: Callable[[S], bool] = lambda _settings: False
    """Returns whether other nodes use the same store. Such a store requires a configured secret and an identifiable
    model."""
    is_common: Callable[[S], bool] = lambda _settings: False
    """Returns whether all ranks of an engine use one store, in which each finds the objects of the others. Only the
    first of the ranks with the same KV then writes. A store shared with other nodes (`is_shared`) is also common."""
    has_one_cap: bool = False
    """Whether all ranks of an engine share one cap, so that each reports the fill level of the whole store. So do ranks
    that share a store with other nodes (`is_shared`)."""
    needs_drive: bool = False
    """Whether the kind requires a drive of this machine, so that a network file system is a mistake."""
    has_cap: bool = True
    """Whether the kind's settings have ``capacity_bytes``, which the tier enforces."""
    keeps_memory: bool = True
    """Whether a tier may register `TierContext.memory` with a device, so that the memory's pages must not change."""
    check: Callable[[S], Iterator[Problem]] = lambda _settings: iter(())
    """Checks the settings against this machine. Changes nothing. An OSError becomes an error of the setting `where`."""
    folder: Callable[[S], Path | None] = lambda _settings: None
    """Returns the store's directory on this machine, for notes and facts about its file system; None if it has none.
    `kvtier inspect` opens no tier in a missing directory."""
    secret_path: Callable[[S], Path | None] = lambda _settings: None
    """Returns the file for the secret that kvtier makes if none is configured; None if the tier has no place for one,
    like a shared tier. A store without a secret finds no objects after a restart."""
    inspect: Callable[[S], Sequence[StoreView]] | None = None
    """Returns the store for `kvtier inspect`, or the stores of all ranks. `kvtier inspect` uses the opened tier if this
    is None."""
    view_at: Callable[[Path], StoreView | None] = lambda _root: None
    """Returns the store in a directory, for `kvtier inspect DIR`; None if there is none of this kind."""
    repair: Callable[[S], Sequence[str] | None] = lambda _settings: None
    """Repairs what keeps the store from opening, for `kvtier inspect repair`. Returns what was done, in sentences;
    empty if nothing was wrong. Returns None if no file there has a store's name, or if the kind has no repair.
    Raises ConfigError if the store may not be changed."""
    open_trial: Callable[[S, Path, int, int], Tier] | None = None
    """Opens an empty temporary tier for measurements, given (settings, an empty directory on the same device, bytes to
    hold, bytes of the largest object). If this is None, measurements open the configured tier with a random model id
    and key id, and delete their objects."""
    discard: Callable[[S, TierContext], None] | None = None
    """Removes all objects that a measurement left in the configured tier, by their model id, and all traces of the key
    id if nothing else uses it. If this is None, measurements delete each of their objects."""
    raw: Callable[[S, TierContext], RawClient | None] | None = None
    """Returns the client below the tier, for `kvtier bench tier`. Its objects go below the context's key id. The
    setting `where` is a directory for this client alone if `open_trial` is defined. No client is measured if this is
    None."""


def built_in() -> list[str]:
    """Return the names of this package's kinds whose modules can be imported."""
    return [name for name in _BUILT_IN if _is_usable(name)]


def names() -> list[str]:
    """Return the names of all known kinds, including those whose packages are broken."""
    return [*_BUILT_IN, *sorted(_outside_points())]


@cache
def by_name(name: str, origin: str = "") -> TierKind[Any]:
    """Return the kind `name`.

    Args:
        name: name of the kind.
        origin: the source of the name, for messages.

    Raises:
        ConfigError: the kind is unknown, or its package cannot be used.
    """
    about = {"setting": "tier kind", "value": repr(name), "origin": origin}
    if name in _BUILT_IN:
        try:
            return cast("TierKind[Any]", import_module(_BUILT_IN[name]).KIND)
        except ImportError as error:
            raise ConfigError(f"needs a package: {error}; {install_hint(name)}", **about) from error
    points = _outside_points().get(name)
    if points is None:
        raise unknown("unknown kind", name, names(), **about)
    if len(points) > 1:
        several = " and ".join(sorted(map(_package, points)))
        raise ConfigError(f"is provided by several packages: {several}", allowed="only one of them installed", **about)
    return _loaded(points[0], origin)


def measures_directories(name: str) -> bool:
    """Return whether the kind is built in and can be measured in a directory."""
    if name not in _BUILT_IN or not _is_usable(name):
        return False
    kind = by_name(name)
    return not kind.is_remote and kind.open_trial is not None


def kind_of(tier: TierSettings) -> TierKind[Any]:
    """Return the kind of a tier with these settings."""
    return by_name(tier.kind)


def is_sealed(tier: TierSettings) -> bool:
    """Return whether the objects of `tier` are sealed; with `auto`, only those in a store that other nodes use."""
    return tier.seal == "on" or (tier.seal == "auto" and kind_of(tier).is_shared(tier))


def checked_name(name: str, origin: str = "") -> str:
    """Return `name` if a tier may have it.

    Raises:
        ConfigError: the name is not allowed.
    """
    if not NAME.fullmatch(name) or len(name) > NAME_LENGTH_MAX or name in RESERVED:
        raise ConfigError(
            setting="tier name",
            value=repr(name[:80]),
            origin=origin,
            allowed="a letter, then letters, digits and single underscores, in lower case, "
            f"at most {NAME_LENGTH_MAX} in all, and none of {', '.join(sorted(RESERVED))}",
        )
    return name


def make(kind: TierKind[S], name: str, values: Mapping[str, object], origin: str) -> S:
    """Make the settings of a tier named `name` from `values`, which `schema.read` returned.

    Raises:
        ConfigError: a setting is missing, or the values do not fit together.
    """
    missing = [each.key for each in settings(kind.settings) if each.is_needed and each.key not in values]
    if missing:
        raise ConfigError(
            f"missing; every {kind.name} tier needs it", setting=f"tiers.{name}.{missing[0]}", origin=origin
        )
    return kind.settings(name=name, **cast("Any", values))


def find(kind: TierKind[Any], label: str, key: str, origin: str) -> Setting:
    """Return the setting `key` of a tier of this kind, labeled ``tiers.NAME``.

    Raises:
        ConfigError: the setting is unknown; the message lists the known ones and suggests the nearest.
    """
    known = {each.key: each._replace(section=label) for each in settings(kind.settings)}
    if key not in known:
        raise unknown(f"{kind.name} tiers have no such setting", key, [*known], setting=f"{label}.{key}", origin=origin)
    return known[key]


def _is_usable(name: str) -> bool:
    try:
        by_name(name)
    except ConfigError:  # its package is missing
        return False
    return True


@cache
def _outside_points() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINTS):
        if point.name not in _BUILT_IN:
            found.setdefault(point.name, []).append(point)
    return found


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "a package without metadata"


def _loaded(point: EntryPoint, origin: str) -> TierKind[Any]:
    value = f"{point.name!r} of the package {_package(point)} ({point.value})"
    about, subject = {"setting": "tier kind", "value": value, "origin": origin}, f"tier kind {value}"
    try:
        kind = cast("TierKind[Any]", point.load())
    except Exception as error:
        raise ConfigError(f"cannot be loaded: {described(error)}", **about) from error
    wrong = _flaw(kind, point.name)
    if wrong:
        raise ConfigError(f"is not usable: {wrong}", **about)
    return replace(
        kind,
        open=_checking(kind.open, Tier, subject),
        open_trial=kind.open_trial and _checking(kind.open_trial, Tier, subject),
        raw=kind.raw and _checking(kind.raw, RawClient, subject),
        inspect=kind.inspect and _checking(kind.inspect, StoreView, subject, makes_several=True),
        view_at=_checking(kind.view_at, StoreView, subject),
    )


def _checking(
    make: Callable[..., Any], interface: type, subject: str, *, makes_several: bool = False
) -> Callable[..., Any]:
    """Wrap `make` so that it refuses objects that lack part of their interface."""

    def checked(*arguments: object) -> object:
        made: object = make(*arguments)
        several = cast("Sequence[object]", made) if makes_several and isinstance(made, Sequence) else [made]
        for each in [it for it in several if it is not None]:
            check_interface(each, interface, subject)
        return cast("object", made)

    return checked


def _flaw(kind: object, name: str) -> str:
    """Return why `kind` cannot be registered as `name`, or an empty string if it can."""
    if not isinstance(kind, TierKind):
        return (
            "it is a class, not a TierKind"
            if isinstance(kind, type)
            else f"it has the type {type(kind).__name__}, not TierKind"
        )
    found = cast("TierKind[Any]", kind)
    if found.name != name or found.settings.kind != name:
        return f"its names are {found.name!r} (kind) and {found.settings.kind!r} (settings), not {name!r}"
    if not NAME.fullmatch(name) or name in RESERVED:
        return "a kind's name must be letters, digits and single underscores in lower case"
    keys = {each.key for each in settings(found.settings)}
    if found.where not in keys:
        return f"its settings have no {found.where!r}, which is its `where`"
    if lost := {each.key for each in settings(TierSettings)} - keys:
        return f"its settings replace {', '.join(sorted(lost))}; use config.schema.other_default"
    hints = ((each.name, hint) for each in fields(TierKind) for hint in (each.type, *get_args(each.type)))
    counts = {field: len(get_args(hint)[0]) for field, hint in hints if get_origin(hint) is Callable}
    wrong = [it for it, count in counts.items() if not takes(getattr(found, it) or print, count)]
    if wrong:
        return f"it is for another release of kvtier, which calls its {' and '.join(wrong)} with other arguments"
    return ""
