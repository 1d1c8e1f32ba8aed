"""The exceptions of kvtier, grouped by remedy.

The mover catches exceptions in one place and turns them into an `Outcome`. Errors in *data* become misses. Only
mistakes in *settings* and *calls* reach the user.
"""

import re
from collections.abc import Iterable
from functools import cached_property
from inspect import getattr_static, isfunction, signature
from shlex import quote
from typing import Any

DETAIL_CHARACTERS = 500
"""Maximum length of an error text. Longer texts are cut."""

_LOGIN = re.compile(r"\A(?:[^/\s:@]*:.*@|[^/\s]*@)", re.DOTALL)
"""Matches a user name and password after the ``://`` of a URL, in the text of another package's error."""

# Each attempt to match is bounded or consumes what it has read, so the time is linear in the length of the text.
_SECRET = re.compile(
    r"((?<![a-z])file (?:= )?'/[^'=?]*':)"
    r"|((?:passw(?:or)?d|passphrase|(?<![a-z])pass|secret(?:_?access)?(?:_?key)?)['\"]? ?[=:])(?! ?\(hidden\)).*"
    r"|((?:pass|secret|token|credential|auth|api.?key)(?![a-z_]{0,20}_file = '?/)[A-Za-z_-]{0,20}['\"]? ?"
    r"(?:= ?|: ?(?:(?:basic|bearer) +|(?=['\"]|\S{5,64}?[\d+=~])))|(?:basic|bearer) +(?=\S{5,64}?[\d+=~]))"
    r"(?:\"[^\"]*\"|'[^']*'|\S+)",
    re.DOTALL | re.IGNORECASE,
)
"""Matches the path of a file, which is not hidden; everything after ``password=``; and the value after ``token=``.
Plain words after ``token:`` do not match, because they may explain the error."""


def other_version(found: int, known: int) -> str:
    """Describe the version `found` in data, if it is not the one `known` here. Such data is not damaged."""
    return f"version {found}, {'older' if found < known else 'newer'} than the one known here, {known}"


def install_hint(extra: str) -> str:
    """Return the command that installs the packages of one of kvtier's extras, as the installed metadata lists them.

    It names the packages rather than ``kvtier[EXTRA]``, which pip can resolve only from an index that has kvtier.
    """
    from importlib.metadata import PackageNotFoundError, requires  # noqa: PLC0415 - slow, and only for this message

    try:
        wanted = requires("kvtier") or []
    except PackageNotFoundError:
        wanted = []
    marked = f"extra == '{extra}'"
    found = [it.partition(";")[0].strip() for it in wanted if it.replace('"', "'").endswith(marked)]
    if not found:  # there is no metadata, as in a source tree, or no such extra
        return f"pip install '.[{extra}]' in a checkout of kvtier"
    return f"pip install {' '.join(map(quote, found))}"


class KvError(Exception):
    """Base class of all exceptions of kvtier."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process restore an error with its text and fields, whatever its constructor takes."""
        return type(self).__new__, (type(self), *self.args), vars(self)


def described(error: BaseException) -> str:
    """Return an error's text for people, shortened and without likely secrets. A KvError is shown without its type."""
    text = str(error) if isinstance(error, KvError) else f"{type(error).__name__}: {error}"
    head, *urls = text.split("://")
    text = "://".join([head, *(_LOGIN.sub("(hidden)@", url) for url in urls)])
    return _SECRET.sub(lambda it: it[1] or f"{it[2] or ''}{it[3] or ''}(hidden)", text)[:DETAIL_CHARACTERS]


class ConfigError(KvError):
    """A setting is wrong. The message is ``SETTING = VALUE (from ORIGIN): PROBLEM; allowed: ALLOWED``.

    Empty parts are left out. No part contains a secret.

    Args:
        problem: the problem, in a few words.
        setting: full name of the setting or option, as the user knows it; several are separated by ``, ``.
        value: the value as text for people.
        origin: the value's source: a file, an environment variable or an option.
        allowed: the allowed values.
    """

    def __init__(
        self, problem: str = "", *, setting: str = "", value: str = "", origin: object = "", allowed: str = ""
    ) -> None:
        super().__init__(problem)
        self.problem, self.allowed = problem, allowed
        self.setting, self.value, self.origin = setting, value, str(origin)

    @property
    def detail(self) -> str:
        """The message without setting, value and origin."""
        return (" " if self.problem.endswith("?") else "; ").join(
            filter(None, (self.problem, self.allowed and f"allowed: {self.allowed}"))
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __str__(self) -> str:
        subject = (" " if self.setting.startswith("-") or " " in self.setting else " = ").join(
            filter(None, (self.setting, self.value))
        )
        return ": ".join(filter(None, (f"{subject} (from {self.origin})" if self.origin else subject, self.detail)))


class UnusablePathError(ConfigError):
    """The file or server that a setting names cannot be used. The setting itself may be correct.

    The error prevents a start only if a required tier needs the path. Commands treat it as a mistake in the settings.
    """


class BadCallError(KvError, ValueError):
    """The arguments of a call are invalid. The call had no effect."""


class UnsupportedModelError(KvError):
    """The model, its cache class or a generation option is not supported."""


class TierError(KvError):
    """A tier failed: an I/O error, no space or a timeout. It may be temporary, and the data may be good."""

    def __init__(self, tier: str, detail: str) -> None:
        super().__init__(f"tier {tier!r}: {detail}")
        self.tier, self.detail = tier, detail


class NoRoomError(TierError):
    """A tier has no room for a write: its disk, quota or server is full. This is not a fault, and reads continue."""


class DamagedStoreError(TierError):
    """A store cannot be used or changed as it is, for example because its marker is missing or a password is refused.

    Waiting does not help. `kvtier inspect repair` repairs a store of files; otherwise the message says what to do.
    """


class UnreadableChunkError(KvError):
    """An object whose codec, version or key this process does not know. It is a miss here, but others may read it.

    The copy stays, because nothing shows that its bytes are bad.

    Args:
        name: name of the object.
        detail: the unknown property.
        reason: `version`, `codec` or `key`.
        version: version of the frame, if that is the unknown property; otherwise None.
    """

    def __init__(self, name: bytes, detail: str, reason: str, version: int | None = None) -> None:
        super().__init__(f"object {name.hex()[:12]}: {detail}")
        self.name, self.detail, self.reason, self.version = name, detail, reason, version


class CorruptChunkError(KvError):
    """The bytes differ from those that were written. Retrying does not help: the copy must be dropped.

    Args:
        name: name of the object.
        detail: the problem.
        reason: `damaged`; if the seal is at fault, `unsealed`, `foreign` or `forged` (FORMAT.md).
    """

    def __init__(self, name: bytes, detail: str, reason: str = "damaged") -> None:
        super().__init__(f"object {name.hex()[:12]}: {detail}")
        self.name, self.detail, self.reason = name, detail, reason


def check_interface(made: object, interface: type, subject: str) -> None:
    """Refuse an extension that cannot be used as `interface`, such as one for an older release of kvtier.

    The extension must have each public member of the interface, and its methods must take the same arguments. No
    property is evaluated, because it may use attributes that the extension does not have yet.

    Args:
        made: the extension.
        interface: a protocol or base class of kvtier.
        subject: description of the extension, for the message.

    Raises:
        ConfigError: members are missing or take other arguments. The message names them.
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


def takes(function: Any, arguments: int, named: Iterable[str] = ()) -> bool:  # noqa: ANN401 - an extension's function
    """Return whether `function` takes this many positional arguments and these keywords; True if Python cannot tell."""
    try:
        signature(function).bind(*range(arguments), **dict.fromkeys(named))
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # ValueError: a function in C; TypeError: wrong arguments or not callable
    return True
