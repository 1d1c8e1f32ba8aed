"""The kind `mooncake`: its settings and how it opens."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from kvtier.config.schema import needed, setting
from kvtier.config.value_types import ChoiceKind, Count, Switch, Text, shown_place
from kvtier.errors import ConfigError
from kvtier.tier.base import RawClient, Tier
from kvtier.tier.registry import TierContext, TierKind, TierSettings
from kvtier.tier.store_view import StoreView

if TYPE_CHECKING:
    from kvtier.tier.mooncake.client import MooncakeClient

if find_spec("mooncake") is None:
    raise ImportError("No module named 'mooncake'")

MASTER_PORT = 50051
PREFIX = re.compile(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings(TierSettings):
    """Objects in the memory of Mooncake's storage nodes."""

    kind: ClassVar[str] = "mooncake"

    master: str = needed(Text(1, 256), f"Address of the master: host, or host:port; {MASTER_PORT} without a port.")
    prefix: str = setting("kvtier", Text(1, 256), "Prefix of all keys.")
    copies: int = setting(1, Count(1, 8), "Copies of each object, on different nodes.")
    soft_pin: bool = setting(default=False, kind=Switch(), help="Ask the master to evict other objects first.")
    protocol: str = setting("tcp", ChoiceKind(("tcp", "rdma")), "How data are transferred.")
    devices: str = setting("", Text(), "RDMA devices, separated by commas; empty: all.")
    tenant_id: str = setting(
        "", Text(0, 256), "Mooncake's tenant, if the master separates tenants; empty: its default one."
    )
    local_address: str = setting("", Text(0, 256), "This machine's address; empty: the one towards the master.")

    def __post_init__(self) -> None:
        TierSettings.__post_init__(self)
        master_address(self)
        if not PREFIX.fullmatch(self.prefix):
            raise ConfigError(
                setting=f"{self.label}.prefix",
                value=repr(self.prefix),
                allowed="letters, digits, dots, dashes, underscores, and single slashes between them",
            )


def master_address(settings: MooncakeSettings) -> tuple[str, int]:
    """Return the host and port of the master.

    Raises:
        ConfigError: the setting is not an address.
    """
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::(\d{1,5}))?", settings.master)
    port = int(found[3] or MASTER_PORT) if found else 0
    if not found or not 0 < port < 1 << 16:
        shown = shown_place(f"mooncake:{settings.master}").removeprefix("mooncake:")
        raise ConfigError(
            setting=f"{settings.label}.master", value=repr(shown), allowed="host, host:port or [IPv6 address]:port"
        )
    return found[1] or found[2], port


def _client(settings: MooncakeSettings) -> "MooncakeClient":
    from kvtier.tier.mooncake.client import MooncakeClient

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


def _open(settings: MooncakeSettings, context: TierContext) -> Tier:
    from kvtier.tier.mooncake.tier import MooncakeTier

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


def _raw(settings: MooncakeSettings, context: TierContext) -> RawClient:
    from kvtier.tier.mooncake.raw_client import RawMooncake
    from kvtier.tier.mooncake.tier import root_of

    root = root_of(f"{settings.prefix}/", context.shared_key_id(settings.name), context.model)
    return RawMooncake(_client(settings), root)


def _inspect(settings: MooncakeSettings) -> Sequence[StoreView]:
    raise ConfigError(f"{settings.label}: a Mooncake store cannot list its objects; see the metrics of its master")


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
