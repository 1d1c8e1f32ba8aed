"""Keys of sealed frames: for each tenant one key per epoch, from lines ``EPOCH TENANT|- HEX64 [open]``.

A tenant's key of the highest epoch that is not marked `open` seals frames, and every listed key opens them. No message
or `repr` shows a key.
"""

import hmac
import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, Self

from kvtier.errors import ConfigError

EPOCH_MAX: Final = 2**32 - 1
LINES_MAX: Final = 10_000
BYTES_MAX: Final = 1 << 20
CHECK_BYTES: Final = 16
TENANT: Final = re.compile(r"(?!-\Z)[A-Za-z0-9._-]{1,64}")
"""Pattern that the whole name of a tenant must match."""
FORM: Final = (
    f"EPOCH TENANT|- HEX64 [open]: a number from 0 to {EPOCH_MAX}; 1 to 64 letters, digits, dots, underscores and "
    "hyphens, or - for no tenant; 64 hexadecimal digits; `open` after a key that does not seal"
)

_LINE = re.compile(rf"([0-9]{{1,10}})[ \t]+(-|{TENANT.pattern})[ \t]+([0-9A-Fa-f]{{64}})([ \t]+open)?")


def hkdf(material: bytes, info: bytes, salt: bytes = b"") -> bytes:
    """Derive 32 bytes with HKDF-SHA-256 (RFC 5869, sections 2.2 and 2.3). A shorter output is a prefix of this one."""
    return hmac.digest(hmac.digest(salt, material, "sha256"), info + b"\1", "sha256")


@dataclass(frozen=True, slots=True)
class SealKey:
    """The key of one epoch of a tenant."""

    tenant: str
    """The tenant's name; empty for none."""
    epoch: int
    key: bytes = field(repr=False)
    """32 secret bytes, from which frame keys are derived."""
    check: bytes = field(repr=False)
    """16 public bytes that tell a reader which key a frame requires."""
    opens_only: bool = False
    """Whether the key opens frames but does not seal yet."""

    @classmethod
    def of(cls, tenant: str, epoch: int, material: bytes, *, opens_only: bool = False) -> Self:
        """Derive `key` and `check` from 32 secret bytes.

        Epoch and tenant enter the derivation, so equal material never gives equal keys. After a change of
        a line's epoch or tenant, its key no longer opens the frames sealed before.
        """
        whose = epoch.to_bytes(4, "little") + tenant.encode()
        key, check = (hkdf(material, domain + whose) for domain in (b"kvtier.seal\0", b"kvtier.check\0"))
        return cls(tenant, epoch, key, check[:CHECK_BYTES], opens_only)


class Keyring:
    """The keys of any number of tenants. A keyring is immutable."""

    __slots__ = ("_by_check", "_sealing", "keys")

    def __init__(self, keys: Iterable[SealKey]) -> None:
        self.keys: AbstractSet[SealKey] = frozenset(keys)
        self._by_check = {key.check: key for key in self.keys}
        sealing = [key for key in self.keys if not key.opens_only]
        self._sealing = {key.tenant: key for key in sorted(sealing, key=lambda key: key.epoch)}

    def sealing(self, tenant: str) -> SealKey | None:
        """Return the key with which `tenant` seals: that of its highest epoch that is not marked `open`.

        Return None if there is no such key. Another tenant's key is never used.
        """
        return self._sealing.get(tenant)

    def knows(self, check: bytes) -> SealKey | None:
        """Return the key that has this `check`, whatever its tenant; None if there is none."""
        return self._by_check.get(check)


def parse(content: bytes, origin: str) -> Keyring:
    """Parse lines of text into keys. Blank lines and text after ``#`` are ignored.

    Args:
        content: at most `BYTES_MAX` bytes and `LINES_MAX` lines, in UTF-8.
        origin: the source of `content`, for messages.

    Raises:
        ConfigError: a line does not have the form `FORM`, or repeats an epoch of a tenant. The message contains
            the origin and the line's number but none of its content, because a field may be a misplaced key.
    """
    # An exception of the decoder would contain the content.
    lines = content.decode("utf-8-sig", errors="replace").rstrip().split("\n")
    if len(content) > BYTES_MAX or len(lines) > LINES_MAX:
        raise ConfigError(
            f"has {len(lines)} lines", setting=origin, allowed=f"at most {LINES_MAX} lines and {BYTES_MAX} bytes"
        )
    found: dict[tuple[str, int], SealKey] = {}
    for number, text in enumerate((line.partition("#")[0].strip() for line in lines), 1):
        if not text:
            continue
        fields = _LINE.fullmatch(text)
        if fields is None or int(fields[1]) > EPOCH_MAX:
            raise ConfigError(f"line {number} is not a key", setting=origin, allowed=FORM)
        owner = ("" if fields[2] == "-" else fields[2], int(fields[1]))
        if owner in found:
            raise ConfigError(f"line {number} repeats the epoch and tenant of an earlier line", setting=origin)
        found[owner] = SealKey.of(*owner, bytes.fromhex(fields[3]), opens_only=bool(fields[4]))
    return Keyring(found.values())
