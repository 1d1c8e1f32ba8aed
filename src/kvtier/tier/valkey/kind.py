"""The kind `valkey`: its settings and how it opens."""
# ruff: noqa: RUF009 - setting is dataclasses.field with our metadata

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvtier.config.schema import needed, setting
from kvtier.config.value_types import Count, FileLocation, HiddenText, PrivateText, Seconds, Switch, Text
from kvtier.errors import ConfigError, UnusablePathError
from kvtier.keys.secret import read_private
from kvtier.tier.base import RawClient, Tier
from kvtier.tier.files.path_checks import tier_file
from kvtier.tier.registry import TierContext, TierKind, TierSettings
from kvtier.tier.store_view import ScannedTier
from kvtier.tier.valkey.connection import Access
from kvtier.tier.valkey.servers import parse_addresses

if TYPE_CHECKING:
    from kvtier.tier.valkey.tier import ValkeyTier

PASSWORD_BYTES_MAX = 4096
_PREFIX = re.compile(r"[A-Za-z0-9._:/-]{1,100}")
_ROOT = re.compile(rb"([0-9a-f]{32})/([0-9a-f]{32})/\{[0-9a-f]{64}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeySettings(TierSettings):
    """Values in Valkey or Redis servers."""

    kind: ClassVar[str] = "valkey"

    addresses: str = needed(
        Text(1, 8192), "Servers: HOST[:PORT], separated by commas; some of a cluster's servers are enough."
    )
    username: str = setting("", Text(0, 256), "User; empty: the default one.")
    password: PrivateText = setting(PrivateText(), HiddenText(), "Password of the user.")
    password_file: Path | None = setting(None, FileLocation(), "File with the password, instead of `password`.")
    any_owner: bool = setting(
        default=False,
        kind=Switch(),
        help="Use credential files of another ordinary user; false: refuse them.",
    )
    database: int = setting(0, Count(0, 1_000_000), "Number of the database; 0 in a cluster.")
    prefix: str = setting("kvtier", Text(1, 100), "Prefix of all keys: letters, digits and . _ : / -")
    lifetime_s: float = setting(
        7 * 86400.0, Seconds(0, 10 * 366 * 86400), "How long an object lives after its last use; 0: without end."
    )
    tls: bool = setting(default=False, kind=Switch(), help="Connect with TLS.")
    ca_file: Path | None = setting(None, FileLocation(pem="CERTIFICATE"), "PEM file of further trusted authorities.")
    certificate_file: Path | None = setting(
        None, FileLocation(pem="CERTIFICATE"), "PEM file of the client's certificate."
    )
    key_file: Path | None = setting(None, FileLocation(pem="PRIVATE KEY"), "PEM file of the key of `certificate_file`.")
    connect_deadline_s: float = setting(2.0, Seconds(1e-2, 60), "How long a connection may take.")
    loads_in_flight: int = setting(32, Count(1, 1024), "Concurrent promotions (tier to host).")
    writes_in_flight: int = setting(16, Count(1, 1024), "Concurrent demotions (host to tier).")

    def __post_init__(self) -> None:
        TierSettings.__post_init__(self)
        nodes = parse_addresses(self.addresses, f"{self.label}.addresses")
        object.__setattr__(self, "addresses", ",".join(map(str, nodes)))
        if not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(
                setting=f"{self.label}.prefix", value=repr(self.prefix), allowed="letters, digits and . _ : / -"
            )
        if self.password and self.password_file:
            raise ConfigError(setting=f"{self.label}.password_file", allowed="password or password_file, not both")
        if self.username and not (self.password or self.password_file):
            raise ConfigError("needs password or password_file", setting=f"{self.label}.username")
        if bool(self.certificate_file) != bool(self.key_file):
            missing = "key_file" if self.certificate_file else "certificate_file"
            raise ConfigError("missing", setting=f"{self.label}.{missing}", allowed="both files, or neither")
        for key in ("ca_file", "certificate_file"):
            if getattr(self, key) and not self.tls:
                raise ConfigError("needs tls = true", setting=f"{self.label}.{key}")


def _access(settings: ValkeySettings) -> Access:
    password = settings.password
    if settings.password_file is not None:
        password = _password_in(settings.password_file, any_owner=settings.any_owner)
    for key in ("ca_file", "certificate_file", "key_file"):
        if getattr(settings, key) is not None:  # checks that it exists, and its owner
            tier_file(settings, key)
    return Access(
        settings.username,
        password,
        settings.database,
        settings.tls,
        settings.ca_file,
        settings.certificate_file,
        settings.key_file,
        settings.connect_deadline_s,
    )


def _password_in(path: Path, *, any_owner: bool) -> PrivateText:
    """Read the only line of a file.

    Raises:
        UnusablePathError: it cannot be read, or is not one line of up to `PASSWORD_BYTES_MAX` bytes.
    """
    content = read_private(path, "Valkey password file", PASSWORD_BYTES_MAX, any_owner=any_owner, any_reader=True)
    text = content.decode(errors="replace").rstrip("\r\n")
    if not text or not text.isprintable() or "\ufffd" in text:
        allowed = f"one line of up to {PASSWORD_BYTES_MAX} bytes in UTF-8"
        raise UnusablePathError(f"Valkey password file {path} must contain {allowed}")
    return PrivateText(text)


def _tier(settings: ValkeySettings, key_id: bytes, model: bytes, *, is_user: bool = True) -> "ValkeyTier":
    from kvtier.tier.valkey.tier import ValkeyTier

    return ValkeyTier(
        settings.addresses,
        key_id=key_id,
        model=model,
        name=settings.name,
        prefix=settings.prefix,
        access=_access(settings),
        lifetime_s=settings.lifetime_s,
        deadline_s=settings.transfer_deadline_s,
        probe_deadline_s=settings.probe_deadline_s,
        is_user=is_user,
    )


def _open(settings: ValkeySettings, context: TierContext) -> Tier:
    return _tier(settings, context.shared_key_id(settings.name), context.model)


def _discard(settings: ValkeySettings, context: TierContext) -> None:
    tier = _tier(settings, context.shared_key_id(settings.name), context.model, is_user=False)
    try:
        tier.discard()
    finally:
        tier.close()


def _inspect(settings: ValkeySettings) -> list[ScannedTier]:
    """Return a view for each secret and model below the prefix."""
    reader = _tier(settings, bytes(16), bytes(16), is_user=False)
    start = f"{settings.prefix}/".encode()
    roots: set[tuple[bytes, bytes]] = set()
    try:
        for keys in reader.pages(start):
            found = (_ROOT.fullmatch(key.removeprefix(start)) for key in keys)
            roots.update((match[1], match[2]) for match in found if match is not None)
    finally:
        reader.close()
    return [
        ScannedTier(
            _tier(settings, bytes.fromhex(key_id.decode()), bytes.fromhex(model.decode()), is_user=False),
            f"valkey:{settings.addresses}/{settings.prefix}/{key_id.decode()}/{model.decode()}",
            model.decode(),
        )
        for key_id, model in sorted(roots)
    ]


def _raw(settings: ValkeySettings, context: TierContext) -> RawClient | None:
    """Make the raw client. Return None for a cluster and for TLS."""
    from kvtier.tier.valkey.raw_client import RawValkey

    access, (node, *others) = _access(settings), parse_addresses(settings.addresses)
    if access.tls or others:
        return None
    prefix = f"{settings.prefix}/{context.shared_key_id(settings.name).hex()}/{context.model.hex()}/"
    client = RawValkey(node, access, settings.transfer_deadline_s, prefix)
    return None if client.is_cluster() else client


KIND = TierKind(
    name="valkey",
    help="Values in a Valkey or Redis server, or in a cluster of them.",
    settings=ValkeySettings,
    where="addresses",
    open=_open,
    keeps_memory=False,
    is_remote=True,
    is_shared=lambda _settings: True,
    has_cap=False,
    inspect=_inspect,
    discard=_discard,
    raw=_raw,
)
