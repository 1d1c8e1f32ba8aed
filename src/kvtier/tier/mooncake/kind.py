"""The kind `mooncake`: its settings and how it opens."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtier.config.schema import needed, setting
from kvtier.config.value_types import Choice, Count, Switch, Text, shown_place
from kvtier.errors import ConfigError
from kvtier.tier.mooncake.client import BAD_SIZE, OK, MooncakeClient, address_of
from kvtier.tier.mooncake.tier import MooncakeTier, root_of
from kvtier.tier.registry import TierContext, TierKind, TierSettings
from kvtier.tier.store_view import StoreView
from kvtier.types import ObjectName

MASTER_PORT = 50051
PREFIX = re.compile(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings(TierSettings):
    """Objects in the memory of Mooncake's storage nodes."""

    kind: ClassVar[str] = "mooncake"

    master: str = needed(Text(1, 256), f"Address of the master: host, or host:port; {MASTER_PORT} without a port.")
    prefix: str = setting("kvtier", Text(1, 256), "Beginning of all keys.")
    copies: int = setting(1, Count(1, 8), "Copies of each object, on different nodes.")
    soft_pin: bool = setting(default=False, kind=Switch(), help="Ask the master to evict other objects first.")
    protocol: str = setting("tcp", Choice(("tcp", "rdma")), "How data are transferred.")
    devices: str = setting("", Text(), "RDMA devices, separated by commas; empty: all.")
    tenant_id: str = setting(
        "", Text(0, 256), "Mooncake's tenant, where the master keeps tenants apart; empty: its default one."
    )
    local_address: str = setting("", Text(0, 256), "This machine's address; empty: that on the way to the master.")

    def __post_init__(self) -> None:
        TierSettings.__post_init__(self)
        master_address(self)
        if not PREFIX.fullmatch(self.prefix):
            raise ConfigError(
                f"{self.label}.prefix = {self.prefix!r}: allowed: letters, digits, dots, dashes, underscores, and "
                "single slashes between them"
            )


def master_address(settings: MooncakeSettings) -> tuple[str, int]:
    """Host and port of the master.

    Raises:
        ConfigError: the setting is no address.
    """
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::(\d{1,5}))?", settings.master)
    port = int(found[3] or MASTER_PORT) if found else 0
    if not found or not 0 < port < 1 << 16:
        shown = shown_place(f"mooncake:{settings.master}").removeprefix("mooncake:")
        raise ConfigError(f"{settings.label}.master = {shown!r}: allowed: host, host:port or [IPv6 address]:port")
    return found[1] or found[2], port


def _client(settings: MooncakeSettings) -> MooncakeClient:
    return MooncakeClient(
        settings.name,
        master_address(settings),
        local_address=settings.local_address,
        protocol=settings.protocol,
        devices=settings.devices,
        copies=settings.copies,
        soft_pin=settings.soft_pin,
        tenant_id=settings.tenant_id,
    )


def _open(settings: MooncakeSettings, context: TierContext) -> MooncakeTier:
    key_id = context.shared_key_id(settings.name)
    return MooncakeTier(
        _client(settings),
        prefix=f"{settings.prefix}/",
        key_id=key_id,
        model=context.model,
        name=settings.name,
        deadline_s=settings.transfer_deadline_s,
        probe_deadline_s=settings.probe_deadline_s,
        memory=context.memory,
    )


class RawMooncake:
    """A `RawClient`: the library's zero-copy calls, from and into memory that it registers once.

    Args:
        client: the library.
        root: of the objects' keys.
    """

    def __init__(self, client: MooncakeClient, root: str) -> None:
        self._client, self._root = client, root
        self._known: dict[int, memoryview] = {}

    def put(self, name: ObjectName, frame: memoryview) -> None:
        """See `RawClient`."""
        self._check(self._client.store.put_from(self._key(name), self._place(frame), frame.nbytes))

    def get(self, name: ObjectName, into: memoryview) -> None:
        """See `RawClient`."""
        count: int = self._client.store.get_into(self._key(name), self._place(into), into.nbytes)
        self._check(OK if count == into.nbytes else min(count, BAD_SIZE))

    def has(self, name: ObjectName) -> bool:
        """See `RawClient`."""
        code: int = self._client.store.is_exist(self._key(name))
        self._check(min(code, OK))
        return code == 1

    def delete(self, name: ObjectName) -> None:
        """See `RawClient`."""
        self._check(self._client.store.remove(self._key(name), True))

    def close(self) -> None:
        """See `RawClient`."""
        self._client.close()
        self._known.clear()

    def _check(self, code: int) -> None:
        if code != OK:
            raise OSError(None, f"Mooncake answered {code}")

    def _place(self, view: memoryview) -> int:
        place = address_of(view)
        if place not in self._known:
            self._client.register(view)
            self._known[place] = view
        return place

    def _key(self, name: ObjectName) -> str:
        return f"{self._root}raw/{name.hex()}"


def _raw(settings: MooncakeSettings, context: TierContext) -> RawMooncake:
    root = root_of(f"{settings.prefix}/", context.shared_key_id(settings.name), context.model)
    return RawMooncake(_client(settings), root)


def _inspect(settings: MooncakeSettings) -> Sequence[StoreView]:
    raise ConfigError(f"{settings.label}: a Mooncake store lists no objects; its master's metrics count them")


KIND = TierKind(
    name="mooncake",
    help="Objects in the memory of Mooncake's storage nodes, which several nodes share.",
    settings=MooncakeSettings,
    where="master",
    open=_open,
    is_remote=True,
    is_shared=lambda _settings: True,
    has_cap=False,
    inspect=_inspect,
    raw=_raw,
)
