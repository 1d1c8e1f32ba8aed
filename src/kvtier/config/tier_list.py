"""Builds the ordered list of tiers from the layers of settings: from tables, or from strings that look like a URL.

    [NAME=]KIND[:WHERE][?key=value&key=value]   disk:/mnt/nvme?capacity=200GiB
    KIND=SIZE[?key=value&key=value]             disk=4TiB, disk=4xpm1753, disk=4x7.68TB, host=64GiB

Every command accepts this form. KIND is a kind in the registry, or ``host`` for host memory. WHERE fills the setting
that the kind names. Without ``NAME=`` the tier has the kind's name. SIZE is short for ``capacity=SIZE``, or for
``drives=SIZE`` if it is a number of drives or a catalogue part. WHERE and values may contain percent-encoded
characters: ``%3F`` for a question mark, ``%26`` for ``&``, ``%25`` for ``%``. A key may omit its unit (``_bytes``,
``_s``, ``_bytes_per_s``).

A Redis or Valkey URL is also accepted: ``rediss://HOST:PORT/DATABASE?key=value`` stands for
``valkey:HOST:PORT`` with ``tls=true`` and ``database``. A URL with a login is refused, because process lists and
logs show it.

Keys are the kind's settings, and the figures of a `DescribedTier` for `kvtier plan`, `replay` and `size`. A
server measures its hardware and ignores these figures.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, cast
from urllib.parse import quote, unquote

from kvtier.config.schema import Setting, SettingsSection, read, setting, settings, short, unknown
from kvtier.config.value_types import PrivateText, RateKind, Seconds, Size, Text, shown_place
from kvtier.errors import ConfigError
from kvtier.tier import registry
from kvtier.tier.registry import TierKind, TierSettings

TIERS_MAX = 16
FORM = "[NAME=]KIND[:WHERE][?key=value&key=value], or KIND=SIZE[?key=value&key=value]"
_ITEMS = f"tables [[tiers]], or strings {FORM}"
HOST = "host"
"""The word for host memory in a string. It is neither a kind nor a tier in the list."""

_SPEC = re.compile(
    r"(?:(?P<name>[^=:?/%@&]*)=)?(?P<kind>[^=:?/%,@&]+)(?::(?P<where>[^?]*))?(?:\?(?P<query>.*))?", re.DOTALL
)
_REDIS = re.compile(
    r"(?P<name>[^=:?/%@&]*=)?(?:redis|valkey)(?P<tls>s?):(?://(?P<place>[^?]*)|(?P<where>[^?]*))(?:\?(?P<query>.*))?",
    re.DOTALL,
)
_NOT_ENCODED = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SIZE = re.compile(r"[0-9.]+ ?(?!x)[A-Za-z]*")
_UNITS = ("", "_bytes", "_s", "_bytes_per_s")
_CAPACITY = "capacity_bytes"


class SettingOrigin(NamedTuple):
    """The source of a value."""

    layer: Literal["default", "file", "environment", "flag", ""]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.layer} {self.where}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedTier(SettingsSection):
    """A tier that a string describes, as input to a calculation. No store is opened. Figures are for the whole tier."""

    section: ClassVar[str] = "tiers"

    name: str
    kind: str
    """A kind in the registry, or `HOST`."""
    is_remote: bool
    """Whether other nodes use the same store, and a lookup costs a round trip."""
    is_default: bool
    """Whether the capacity is the kind's default."""
    capacity_bytes: int | None = setting(
        None, Size(0, 2**60), "Bytes of KV that the tier holds; None: the size of its drives."
    )
    drives: str | None = setting(None, Text(1, 100), "Drives: 4xpm1753 of the catalogue, or 4x7.68TB.")
    read_bytes_per_s: int | None = setting(None, RateKind(), "Bandwidth of reads; of host memory to the engine.")
    write_bytes_per_s: int | None = setting(None, RateKind(), "Bandwidth of writes; of host memory from the engine.")
    latency_s: float | None = setting(None, Seconds(0, 60), "Time of the smallest read beyond its bytes.")


_FIGURES = {each.key: each for each in settings(DescribedTier)}


@dataclass(frozen=True, slots=True)
class _Draft:
    """One tier while its settings are read, layer by layer (file, environment, flags)."""

    name: str
    kind: TierKind[Any]
    origin: SettingOrigin
    values: dict[str, object]
    origins: dict[str, SettingOrigin]

    @property
    def label(self) -> str:
        return f"tiers.{self.name}"

    def set(self, key: str, raw: object, origin: SettingOrigin, *, is_text: bool) -> None:
        setting = registry.find(self.kind, self.label, key, str(origin))
        self.values[key] = read(setting, raw, str(origin), is_text=is_text)
        self.origins[key] = origin


class TierList:
    """The tiers from the layers of settings that have been read so far, in lookup order.

    Args:
        tiers: the initial tiers.
    """

    def __init__(self, tiers: Sequence[TierSettings] = ()) -> None:
        self.origin = SettingOrigin("default")
        """The source of the list."""
        self._drafts = [_of_settings(tier, self.origin) for tier in tiers]

    def replace(self, given: object, origin: SettingOrigin) -> int | None:
        """Replace the whole list with `given`, a list of tables, strings and settings.

        Return the capacity of host memory if a string gives it. A list of only that string replaces no tiers.

        Raises:
            ConfigError: a tier is malformed, or two have the same name.
        """
        if not isinstance(given, list | tuple):
            raise ConfigError("not a list", setting="tiers", origin=origin, allowed=_ITEMS)
        items = cast("Sequence[object]", given)
        if len(items) > TIERS_MAX:
            raise ConfigError(f"{len(items)} tiers", setting="tiers", origin=origin, allowed=f"at most {TIERS_MAX}")
        hosts = [item for item in items if isinstance(item, str) and _cut(item, origin).kind == HOST]
        if len(hosts) > 1:
            raise ConfigError("host memory is given twice", setting="tiers", origin=origin, allowed="once")
        drafts = [_draft(item, origin) for item in items if item not in hosts]
        refuse_equal_names([draft.name for draft in drafts], str(origin))
        if drafts or not hosts:
            self._drafts, self.origin = drafts, origin
        return describe(hosts[0], origin).capacity_bytes if hosts else None

    def set(self, name: str, key: str, raw: object, origin: SettingOrigin, *, is_text: bool) -> None:
        """Set one value of the tier `name`.

        Raises:
            ConfigError: there is no such tier or setting, or the value is not allowed.
        """
        for draft in self._drafts:
            if draft.name == name:
                draft.set(key, raw, origin, is_text=is_text)
                return
        raise unknown(
            f"no tier has this name{'' if self._drafts else '; no tier is configured'}",
            name,
            [draft.name for draft in self._drafts],
            setting=f"tiers.{name}",
            origin=str(origin),
        )

    def settings(self) -> tuple[TierSettings, ...]:
        """Return the tiers.

        Raises:
            ConfigError: a required value is missing, or values contradict each other.
        """
        return tuple(registry.make(draft.kind, draft.name, draft.values, str(draft.origin)) for draft in self._drafts)

    def given(self) -> dict[str, SettingOrigin]:
        """Return the origin of each given value by ``tiers.NAME.key``, even if the values contradict each other."""
        return {f"tiers.{it.name}.{key}": origin for it in self._drafts for key, origin in it.origins.items()}

    def origins(self) -> Iterator[tuple[str, SettingOrigin]]:
        """Yield the origin of the list, and of each value by ``tiers.NAME.key``."""
        yield "tiers", self.origin
        for draft, tier in zip(self._drafts, self.settings(), strict=True):
            for each in tier.settings():
                yield each.name, draft.origins.get(each.key, SettingOrigin("default"))


def parse(text: str, origin: str = "Python", where: object = None) -> TierSettings:
    """Read the settings of one tier from a string in the form `FORM`.

    Args:
        text: the tier.
        origin: its source, for messages.
        where: a value that replaces WHERE of the text; None keeps it.

    Raises:
        ConfigError: the text does not have this form, or a value is not allowed.
    """
    draft = _of_text(text, SettingOrigin("flag", origin))
    values = draft.values if where is None else {**draft.values, draft.kind.where: where}
    return registry.make(draft.kind, draft.name, values, str(draft.origin))


def describe(text: str, origin: SettingOrigin) -> DescribedTier:
    """Read the hardware of one tier, or of host memory, from a string in the form `FORM`.

    The kind's own settings are checked. WHERE may be missing.

    Raises:
        ConfigError: the text does not have this form, it has no capacity, or a value is not allowed.
    """
    parts = _cut(text, origin)
    draft = None if parts.kind == HOST else _empty(parts.kind, parts.name, origin)
    own = {} if draft is None else {each.key: each for each in settings(draft.kind.settings)}
    values = _values(parts, {**own, **_FIGURES}, _CAPACITY if draft is None else draft.kind.where, own)
    figures = {key: value for key, value in values.items() if key in _FIGURES}
    if draft is None and "drives" in figures:
        raise parts.error("host memory has no drives", "a size, such as host=64GiB")
    is_default = not {_CAPACITY, "drives"} & figures.keys()
    if is_default:
        figures[_CAPACITY] = own[_CAPACITY].default if _CAPACITY in own else None
        if not figures[_CAPACITY]:
            raise parts.error(f"has no capacity; give one, as in {parts.kind}=40TiB or capacity=40TiB")
    return DescribedTier(
        name=HOST if draft is None else draft.name,
        kind=parts.kind,
        is_remote=draft is not None and draft.kind.is_remote,
        is_default=is_default,
        **cast("dict[str, Any]", figures),
    )


def kind_of(text: str, origin: str) -> TierKind[Any]:
    """Read the kind of a tier from a string in the form `FORM`.

    Raises:
        ConfigError: the text does not have this form, or its kind is unknown.
    """
    return registry.by_name(_cut(text, SettingOrigin("flag", origin)).kind, origin)


def is_spec(text: str) -> bool:
    """Return whether `text` has the form of a tier with a WHERE, and is not a path."""
    found = _SPEC.fullmatch(text)
    return found is not None and found["where"] is not None and bool(registry.NAME.fullmatch(found["kind"]))


def spec(kind: str, where: object) -> str:
    """Return a string for `parse`, with `where` percent-encoded."""
    return f"{kind}:{quote(str(where), safe='/')}"


def refuse_equal_names(names: Sequence[str], origin: str) -> None:
    """Check that the tiers' names differ.

    Raises:
        ConfigError: two names are equal.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two tiers are named {twice[0]!r}",
            setting="tiers",
            origin=origin,
            allowed=f'different names, as in name = "{twice[0]}_2" or {twice[0]}_2=KIND:WHERE',
        )


def _draft(item: object, origin: SettingOrigin) -> _Draft:
    if isinstance(item, TierSettings):
        return _of_settings(item, origin)
    if isinstance(item, str):
        return _of_text(item, origin)
    if isinstance(item, Mapping):
        return _of_table(cast("Mapping[str, object]", item), origin)
    raise ConfigError("not a tier", setting="tiers", value=short(item), origin=origin, allowed=_ITEMS)


def _of_settings(tier: TierSettings, origin: SettingOrigin) -> _Draft:
    values = {each.key: getattr(tier, each.key) for each in tier.settings()}
    return _Draft(tier.name, registry.kind_of(tier), origin, values, {})


def _of_table(table: Mapping[str, object], origin: SettingOrigin) -> _Draft:
    values = dict(table)
    kind_name, name = values.pop("kind", None), values.pop("name", None)
    if not isinstance(kind_name, str):
        what = "has no kind" if kind_name is None else f"has kind = {short(kind_name)}"
        raise ConfigError(
            f"a tier {what}", setting="tiers", origin=origin, allowed=f"the kinds {', '.join(registry.names())}"
        )
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"a tier has name = {short(name)}", setting="tiers", origin=origin, allowed="a string")
    draft = _empty(kind_name, name, origin)
    for key, raw in values.items():
        draft.set(key, raw, origin, is_text=False)
    return draft


def _of_text(text: str, origin: SettingOrigin) -> _Draft:
    parts = _cut(text, origin)
    draft = _empty(parts.kind, parts.name, origin)
    own = {each.key: each for each in settings(draft.kind.settings)}
    # A capacity that the kind does not enforce is refused: a server would exceed it.
    hardware = {key: each for key, each in _FIGURES.items() if key != _CAPACITY}
    values = _values(parts, {**hardware, **own}, draft.kind.where, own)
    draft.values.update({key: value for key, value in values.items() if key in own})
    draft.origins.update(dict.fromkeys(draft.values, origin))
    return draft


class _Parts(NamedTuple):
    """The parts of a text, still percent-encoded."""

    name: str | None
    kind: str
    where: str
    words: list[str]
    """Each ``key=value``; the one for SIZE comes first, if any."""
    origin: SettingOrigin
    shown: str
    """The text for messages, without values, because they may be secret."""

    def error(self, problem: str, allowed: str = "") -> ConfigError:
        """Return an error about the whole text."""
        return ConfigError(problem, setting="tiers", value=repr(self.shown), origin=self.origin, allowed=allowed)


def _cut(text: str, origin: SettingOrigin) -> _Parts:
    whole = _Parts(None, "", "", [], origin, shown_place(text))
    found = _SPEC.fullmatch(_as_valkey(text.strip(), whole))
    if found is None or (found["name"] is None and found["kind"][0].isdigit()):
        raise whole.error("not a valid tier", f"{FORM}; the kinds are {', '.join(registry.names())}")
    name, kind, where, query = found.groups()
    if (name, where, query) == (None, None, None) and kind not in (HOST, *registry.names()):
        # The text may be the end of a secret that contains a space.
        raise unknown("unknown kind", kind, registry.names(), setting="tiers", value="(hidden)", origin=str(origin))
    words = [] if query is None else query.split("&")
    if name is not None and where is None and kind not in registry.names():
        words = [f"{'capacity' if _SIZE.fullmatch(kind) else 'drives'}={kind}", *words]
        name, kind = None, name
    return _Parts(name, kind, where or "", words, origin, whole.shown)


def _as_valkey(text: str, whole: _Parts) -> str:
    """Return a Redis or Valkey URL as a string of the kind ``valkey``, and any other string unchanged.

    Raises:
        ConfigError: the URL has a login.
    """
    found = _REDIS.fullmatch(text)
    if found is None:
        return text
    addresses, _, database = (found["place"] or found["where"] or "").partition("/")
    if "@" in (found["place"] or ""):
        raise whole.error(
            "the URL contains a login, which process lists show",
            "username=NAME&password_file=PATH after a question mark, or the environment "
            "(KVTIER_TIERS__VALKEY__PASSWORD)",
        )
    words = [*(["tls=true"] if found["tls"] else []), *([f"database={database}"] if database else [])]
    query = "&".join([*words, *([found["query"]] if found["query"] else [])])
    return f"{found['name'] or ''}valkey:{addresses}{'?' if query else ''}{query}"


def _values(parts: _Parts, known: Mapping[str, Setting], where: str, own: Mapping[str, Setting]) -> dict[str, object]:
    """Return a string's values by key. `where` is the key that WHERE fills, and `own` are the kind's settings.

    A figure after a secret may be the rest of the secret, so it is neither read nor shown.
    """
    label = HOST if parts.kind == HOST else f"tiers.{parts.name or parts.kind}"
    values: dict[str, object] = {}
    for part in (*([f"{where}={parts.where}"] if parts.where else []), *parts.words):
        word, equals, raw = part.partition("=")
        key = next((word + unit for unit in _UNITS if word + unit in known), word)
        if key not in own and any(isinstance(value, PrivateText) for value in values.values()):
            raise parts.error(
                "the text after a secret is not a setting of this tier (hidden); write '&' in the secret as %26, and "
                "planning figures before the secret"
            )
        if not equals or not word:
            shown = repr(word) if not word or key in known else "(hidden)"
            raise parts.error(f"{shown} is not key=value", FORM)
        if key not in known:
            raise unknown(
                f"{parts.kind} tiers have no such setting",
                key,
                [*known],
                setting=f"{label}.{key}",
                origin=str(parts.origin),
            )
        if key in values:
            raise ConfigError("given twice", setting=f"{label}.{key}", origin=parts.origin, allowed="once")
        values[key] = read(known[key]._replace(section=label), _decoded(raw, parts), str(parts.origin), is_text=True)
    return values


def _empty(kind_name: str, name: str | None, origin: SettingOrigin) -> _Draft:
    kind = registry.by_name(kind_name, str(origin))
    return _Draft(registry.checked_name(kind_name if name is None else name, str(origin)), kind, origin, {}, {})


def _decoded(text: str, parts: _Parts) -> str:
    if _NOT_ENCODED.search(text):
        raise parts.error("'%' is not followed by two hexadecimal digits; write %25")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise parts.error("its percent-encoded bytes are not UTF-8") from None
