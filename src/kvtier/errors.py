"""Exceptions, by what can be done about them.

The mover catches them in one place and turns them into an `Outcome`. Errors in *data* become misses. Only mistakes in
*settings* and *calls* reach the user.
"""

import re
from collections.abc import Iterable
from functools import cached_property
from inspect import getattr_static, isfunction, signature
from shlex import quote
from typing import Any

DETAIL_CHARACTERS = 500
"""A longer text of an error is cut."""

_LOGIN = re.compile(r"\A(?:[^/\s:@]*:.*@|[^/\s]*@)", re.DOTALL)
"""A user name and password behind the ``://`` of a URL, in the text of another package's error."""

# Each search ends after a bounded number of characters or consumes what it has read: time grows with the text only.
_SECRET = re.compile(
    r"((?:passw(?:or)?d|passphrase|(?<![a-z])pass|secret(?:_?access)?(?:_?key)?)['\"]? ?[=:])(?! ?\(hidden\)).*"
    r"|((?:pass|secret|token|credential|auth|api.?key)[A-Za-z_-]{0,20}['\"]? ?"
    r"(?:= ?|: ?(?:(?:basic|bearer) +|(?=['\"]|\S{5,64}?[\d+=~])))|(?:basic|bearer) +(?=\S{5,64}?[\d+=~]))"
    r"(?:\"[^\"]*\"|'[^']*'|\S+)",
    re.DOTALL | re.IGNORECASE,
)
"""All after ``password=``, and a value after ``token=``. After ``token:`` a reason may follow: it is in plain words."""


def other_version(found: int, known: int) -> str:
    """Words for a version other than the one `known` here. Such bytes are old or new, and not damaged."""
    return f"version {found}, {'older' if found < known else 'newer'} than the one known here, {known}"


def install_hint(extra: str) -> str:
    """The command that installs the packages of an extra of kvtier, by the metadata of the installed version.

    The packages are named rather than ``kvtier[EXTRA]``, which pip can resolve only where an index has kvtier.
    """
    from importlib.metadata import PackageNotFoundError, requires  # noqa: PLC0415 - slow, and only for this message

    try:
        wanted = requires("kvtier") or []
    except PackageNotFoundError:
        wanted = []
    marked = f"extra == '{extra}'"
    found = [it.partition(";")[0].strip() for it in wanted if it.replace('"', "'").endswith(marked)]
    if not found:  # without metadata, as from a source tree, or no such extra
        return f"pip install '.[{extra}]' in a checkout of kvtier"
    return f"pip install {' '.join(map(quote, found))}"


class KvError(Exception):
    """Base class of all exceptions of kvtier."""


def described(error: BaseException) -> str:
    """The text of an error for people, with its type unless it is kvtier's; cut, and without what may be a secret."""
    text = str(error) if isinstance(error, KvError) else f"{type(error).__name__}: {error}"
    head, *urls = text.split("://")
    text = "://".join([head, *(_LOGIN.sub("(hidden)@", url) for url in urls)])
    return _SECRET.sub(r"\1\2(hidden)", text)[:DETAIL_CHARACTERS]


class ConfigError(KvError):
    """A setting is wrong. The message names the value, its origin and the allowed values."""


class UnusablePathError(ConfigError):
    """What is at a path or an address that a setting names cannot be used: the setting itself may be right.

    It never stops a start, unless a tier needs it that is required. For commands it is a mistake.
    """


class BadCallError(KvError, ValueError):
    """The arguments of a call are invalid. The call had no effect."""


class UnsupportedModelError(KvError):
    """The model, its cache class or a generation option is not supported."""


class TierError(KvError):
    """A tier failed: an I/O error, no space or a time-out. It may be temporary, and the data may be good."""

    def __init__(self, tier: str, detail: str) -> None:
        super().__init__(f"tier {tier!r}: {detail}")
        self.tier, self.detail = tier, detail


class NoRoomError(TierError):
    """A tier has no room for a write: its disk, quota or server is full. It is not a fault, and reads go on."""


class DamagedStoreError(TierError):
    """What is at a store's place cannot be used or changed: its marker is missing, or its server refuses the password.

    Waiting does not help. `kvtier inspect repair` mends a store of files, or the message says what to do.
    """


class UnreadableChunkError(KvError):
    """This process cannot read an object that another may: an unknown codec, version or key. It is a miss.

    The copy stays: nothing shows that its bytes are bad.

    Args:
        name: of the object.
        detail: what is not known.
        reason: `version`, `codec` or `key`.
        version: of the frame, if it is the version that is not known.
    """

    def __init__(self, name: bytes, detail: str, reason: str, version: int | None = None) -> None:
        super().__init__(f"object {name.hex()[:12]}: {detail}")
        self.name, self.detail, self.reason, self.version = name, detail, reason, version


class CorruptChunkError(KvError):
    """The bytes differ from those that were written. Retrying does not help: the copy must be dropped.

    Args:
        name: of the object.
        detail: what is wrong.
        reason: `damaged`; or of a seal: `unsealed`, `foreign`, `forged` (FORMAT.md).
    """

    def __init__(self, name: bytes, detail: str, reason: str = "damaged") -> None:
        super().__init__(f"object {name.hex()[:12]}: {detail}")
        self.name, self.detail, self.reason = name, detail, reason


def check_interface(made: object, interface: type, subject: str) -> None:
    """Refuse an extension that cannot be used as `interface`, such as one for an older release of kvtier.

    It must have each public member of the interface, and its methods must take the same arguments. No property runs:
    it may need what the extension does not have yet.

    Args:
        made: the extension.
        interface: a protocol or base class of kvtier.
        subject: what the extension is, for the message.

    Raises:
        ConfigError: it lacks some. The message names them.
    """
    names = {
        name
        for base in interface.__mro__
        if base.__module__.startswith("kvtier.")
        for name in (*vars(base), *vars(base).get("__annotations__", ()))
        if not name.startswith("_")
    }
    lost: list[str] = []
    for name in sorted(names):
        wanted = getattr(interface, name, None)
        given = [*signature(wanted).parameters.values()][1:] if isfunction(wanted) else []
        named = [it.name for it in given if it.kind is it.KEYWORD_ONLY]
        if not isinstance(getattr_static(made, name, None), property | cached_property) and (
            not hasattr(made, name)
            or (isfunction(wanted) and not takes(getattr(made, name), len(given) - len(named), named))
        ):
            lost.append(f"{name}({', '.join(it.name for it in given)})" if isfunction(wanted) else name)
    if lost:
        raise ConfigError(
            f"{subject} is for another release of kvtier: {interface.__module__}.{interface.__qualname__} needs "
            f"{', '.join(lost)}"
        )


def takes(function: Any, arguments: int, named: Iterable[str] = ()) -> bool:  # noqa: ANN401 - of an extension
    """Whether it can be called with that many arguments and these names, as far as Python knows."""
    try:
        signature(function).bind(*range(arguments), **dict.fromkeys(named))
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # it is written in C; a TypeError is about the arguments, or `function`
    return True
