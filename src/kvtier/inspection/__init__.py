"""Inspection and repair of stores, from outside the process that uses them."""

from collections.abc import Sequence
from pathlib import Path

from kvtier.config import tier_list
from kvtier.config.loader import load
from kvtier.config.value_types import without_login
from kvtier.errors import ConfigError
from kvtier.inspection.inspector import StoreInspector
from kvtier.keys.secret import key_id
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.runtime.secret import configured_secret
from kvtier.tier import registry
from kvtier.tier.registry import TierContext, TierSettings
from kvtier.tier.store_view import ScannedTier, StoreView


def open_store(where: str | Path) -> StoreInspector:
    """The inspector of a store.

    Args:
        where: a store's directory, or a tier as `--tier` gives it.

    Raises:
        ConfigError: there is no store of a known kind and version.
        TierError: it cannot be opened.
    """
    text = str(where)
    if tier_list.is_spec(text) and not Path(text).exists():
        return open_tier(tier_list.parse(text, without_login(text).partition("?")[0]))
    return StoreInspector([_view_at(Path(where))], text)


def open_tier(settings: TierSettings) -> StoreInspector:
    """The inspector of a tier's store, or of the stores of all its ranks.

    Raises:
        ConfigError: there is no store of a known version.
        TierError: it cannot be opened.
    """
    kind = registry.kind_of(settings)
    place = str(getattr(settings, kind.where))
    if kind.inspect is not None:
        views: Sequence[StoreView] = kind.inspect(settings)
    elif (folder := kind.folder(settings)) is not None and not folder.exists():
        views = []  # opening the tier would make a store
    else:
        layout = KvLayout(1, (GroupLayout(History(), (4096,), "inspect"),))
        secret = configured_secret(load().config) if kind.is_shared(settings) else None
        if kind.is_shared(settings) and secret is None:
            raise ConfigError(f"{place}: a shared tier needs its secret; set store.secret_file")
        context = TierContext(layout=layout, key_id=None if secret is None else key_id(secret))
        views = [ScannedTier(kind.open(settings, context), place)]
    if not views and not kind.is_shared(settings):  # a shared one is empty until the first store
        raise ConfigError(f"{place} holds no store of kind {kind.name}")
    return StoreInspector(views, place)


def _view_at(root: Path) -> StoreView:
    kinds = [registry.by_name(name) for name in registry.built_in()]
    for kind in kinds:
        view = kind.view_at(root)
        if view is not None:
            return view
    for kind in kinds:
        if kind.view_at(root / "rank-0") is not None:
            raise ConfigError(
                f"{root} is of the {kind.name} tier; allowed here: one of its stores, such as {root / 'rank-0'}, or "
                f"all of them: {tier_list.spec(kind.name, root)}"
            )
    why = "is not a directory" if root.exists() else "does not exist"
    if root.is_dir():
        why = "holds no store that is known here"
    raise ConfigError(f"{root} {why}, so it is not a kvtier store; allowed here: a store's directory, or KIND:WHERE")
