"""The ordered list of tiers while the layers of settings are read: as tables, or as texts of the form of a URL.

    [NAME=]KIND:WHERE?key=value&key=value       disk:/mnt/nvme?capacity=200GiB

KIND is a kind of the registry, WHERE fills the setting that the kind names, NAME is the kind's without ``NAME=``. WHERE
and values may contain percent-encoded characters: ``%3F`` for a question mark, ``%26`` for ``&``, ``%25`` for ``%``.
A key may leave out its unit (``_bytes``, ``_s``).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import quote, unquote

from kvtier.config.schema import near, read, settings
from kvtier.config.value_types import PrivateText, without_login
from kvtier.errors import ConfigError
from kvtier.tier import registry
from kvtier.tier.registry import TierKind, TierSettings

TIERS_MAX = 16
FORM = "[NAME=]KIND:WHERE?key=value&key=value"

_SPEC = re.compile(r"(?:(?P<name>[^=:?/%]*)=)?(?P<kind>[^=:?/%]*):(?P<rest>.*)", re.DOTALL)
_NOT_ENCODED = re.compile(r"%(?![0-9A-Fa-f]{2})")


class SettingOrigin(NamedTuple):
    """The source of a value."""

    layer: Literal["default", "file", "environment", "flag", ""]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.layer} {self.where}".strip()


@dataclass(frozen=True, slots=True)
class _Draft:
    """One tier, until all layers are read."""

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
    """The tiers that the layers read so far give, in the order in which they are asked.

    Args:
        tiers: tiers to begin with.
    """

    def __init__(self, tiers: Sequence[TierSettings] = ()) -> None:
        self.origin = SettingOrigin("default")
        """Of the list."""
        self._drafts = [_of_settings(tier, self.origin) for tier in tiers]

    def replace(self, given: object, origin: SettingOrigin) -> None:
        """Replace the whole list by `given`, a list of tables, texts and settings.

        Raises:
            ConfigError: a tier is not well formed, or two have the same name.
        """
        if not isinstance(given, list | tuple):
            raise ConfigError(f"tiers (from {origin}): not a list; allowed: tables [[tiers]], or texts {FORM}")
        items = cast("Sequence[object]", given)
        if len(items) > TIERS_MAX:
            raise ConfigError(f"tiers (from {origin}): {len(items)} tiers; allowed: at most {TIERS_MAX}")
        drafts = [_draft(item, origin) for item in items]
        refuse_equal_names([draft.name for draft in drafts], str(origin))
        self._drafts, self.origin = drafts, origin

    def set(self, name: str, key: str, raw: object, origin: SettingOrigin, *, is_text: bool) -> None:
        """Set one value of the tier `name`.

        Raises:
            ConfigError: there is no such tier or setting, or the value is not allowed.
        """
        for draft in self._drafts:
            if draft.name == name:
                draft.set(key, raw, origin, is_text=is_text)
                return
        known = near(name, [draft.name for draft in self._drafts]) if self._drafts else "; no tier is configured"
        raise ConfigError(f"tiers.{name} (from {origin}): no tier has this name{known}")

    def settings(self) -> tuple[TierSettings, ...]:
        """The tiers.

        Raises:
            ConfigError: a needed value is missing, or values do not go together.
        """
        return tuple(registry.make(draft.kind, draft.name, draft.values, str(draft.origin)) for draft in self._drafts)

    def origins(self) -> Iterator[tuple[str, SettingOrigin]]:
        """The origin of the list, and of each value by ``tiers.NAME.key``."""
        yield "tiers", self.origin
        for draft, tier in zip(self._drafts, self.settings(), strict=True):
            for each in tier.settings():
                yield each.name, draft.origins.get(each.key, SettingOrigin("default"))


def parse(text: str, origin: str = "Python") -> TierSettings:
    """The settings of one tier from a text of the form `FORM`.

    Raises:
        ConfigError: it has another form, or a value is not allowed.
    """
    listed = TierList()
    listed.replace([text], SettingOrigin("flag", origin))
    return listed.settings()[0]


def is_spec(text: str) -> bool:
    """Whether `text` begins like a tier, and is no path."""
    found = _SPEC.fullmatch(text)
    return found is not None and bool(registry.NAME.fullmatch(found["kind"]))


def spec(kind: str, where: object) -> str:
    """A text for `parse`: `where` is percent-encoded."""
    return f"{kind}:{quote(str(where), safe='/')}"


def refuse_equal_names(names: Sequence[str], origin: str) -> None:
    """Check that the tiers' names differ.

    Raises:
        ConfigError: two are equal.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"tiers (from {origin}): two tiers are named {twice[0]!r}; allowed: different names, as in "
            f'name = "{twice[0]}_2" or {twice[0]}_2=KIND:WHERE'
        )


def _draft(item: object, origin: SettingOrigin) -> _Draft:
    if isinstance(item, TierSettings):
        return _of_settings(item, origin)
    if isinstance(item, str):
        return _of_text(item, origin)
    if isinstance(item, Mapping):
        return _of_table(cast("Mapping[str, object]", item), origin)
    raise ConfigError(f"tiers (from {origin}): {str(item)[:80]!r}; allowed: tables [[tiers]], or texts {FORM}")


def _of_settings(tier: TierSettings, origin: SettingOrigin) -> _Draft:
    values = {each.key: getattr(tier, each.key) for each in tier.settings()}
    return _Draft(tier.name, registry.kind_of(tier), origin, values, {})


def _of_table(table: Mapping[str, object], origin: SettingOrigin) -> _Draft:
    values = dict(table)
    kind_name, name = values.pop("kind", None), values.pop("name", None)
    if not isinstance(kind_name, str):
        what = "without kind" if kind_name is None else f"with kind = {kind_name!r}"
        raise ConfigError(f"tiers (from {origin}): a tier {what}; known kinds: {', '.join(registry.names())}")
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"tiers (from {origin}): a tier with name = {name!r}; allowed: a text")
    draft = _empty(kind_name, name, origin)
    for key, raw in values.items():
        draft.set(key, raw, origin, is_text=False)
    return draft


def _of_text(text: str, origin: SettingOrigin) -> _Draft:
    shown = without_login(text).partition("?")[0][:120]  # values may be secret
    found = _SPEC.fullmatch(text.strip())
    if found is None:
        kinds = ", ".join(registry.names())
        raise ConfigError(f"tier {shown!r} (from {origin}): not of the form {FORM}; known kinds: {kinds}")
    where, question, query = found["rest"].partition("?")
    draft = _empty(found["kind"], found["name"], origin)
    if where:
        draft.set(draft.kind.where, _decoded(where, shown, origin), origin, is_text=True)
    for part in query.split("&") if question else ():
        word, equals, raw = part.partition("=")
        is_known = _full(word, draft.kind) in {each.key for each in settings(draft.kind.settings)}
        if not is_known and any(isinstance(value, PrivateText) for value in draft.values.values()):
            raise ConfigError(
                f"tier {shown!r} (from {origin}): what follows a secret is no setting (hidden); write '&' in it as %26"
            )
        if not equals or not word:
            raise ConfigError(f"tier {shown!r} (from {origin}): {word[:40]!r} is not key=value; allowed: {FORM}")
        key = _full(word, draft.kind)
        if key in draft.values:
            raise ConfigError(f"{draft.label}.{key} (from {origin}): given twice; allowed: once")
        draft.set(key, _decoded(raw, shown, origin), origin, is_text=True)
    return draft


def _full(key: str, kind: TierKind[Any]) -> str:
    """`key`, or the one that differs by its unit."""
    known = {each.key for each in settings(kind.settings)}
    return next((full for full in (key, f"{key}_bytes", f"{key}_s") if full in known), key)


def _empty(kind_name: str, name: str | None, origin: SettingOrigin) -> _Draft:
    kind = registry.by_name(kind_name, str(origin))
    try:
        name = registry.checked_name(kind_name if name is None else name)
    except ConfigError as error:
        raise ConfigError(f"{error} (from {origin})") from None
    return _Draft(name, kind, origin, {}, {})


def _decoded(text: str, shown: str, origin: SettingOrigin) -> str:
    if _NOT_ENCODED.search(text):
        raise ConfigError(f"tier {shown!r} (from {origin}): '%' is not followed by two hexadecimal digits; write %25")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ConfigError(f"tier {shown!r} (from {origin}): its percent-encoded bytes are not UTF-8") from None
