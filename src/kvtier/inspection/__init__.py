"""Inspects and repairs stores from outside the process that uses them."""

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path

from kvtier.config import tier_list
from kvtier.config.loader import Loaded, load
from kvtier.config.value_types import shown_place
from kvtier.errors import ConfigError
from kvtier.inspection.inspector import MODEL_DIGITS, StoreInspector
from kvtier.keys.key_source import open_keys, read_file
from kvtier.keys.seal_keys import Keyring
from kvtier.keys.secret import key_id
from kvtier.keys.secret import load as load_secret
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.runtime.store_secret import configured_secret
from kvtier.tier import registry
from kvtier.tier.files import fingerprint_notes as notes
from kvtier.tier.registry import TierContext, TierSettings
from kvtier.tier.store_view import Health, ScannedTier, StoreView


def open_store(where: str | Path | TierSettings, settings: Callable[[], Loaded] = load) -> StoreInspector:
    """Return the inspector of a store.

    Args:
        where: a store's directory, a tier in the form of `--tier`, or a configured tier.
        settings: loads the settings, which contain the secret of a shared tier.

    Raises:
        ConfigError: `where` holds no store of a known kind and version.
        TierError: the store cannot be opened.
    """
    tier = named_tier(where)
    if tier is None:
        root = Path(str(where))
        noted = root.absolute().parent if root.name.startswith("rank-") else root
        return StoreInspector([_view_at(root)], str(where), _classes(noted))
    kind = registry.kind_of(tier)
    place = str(getattr(tier, kind.where))
    if kind.inspect is not None:
        views: Sequence[StoreView] = kind.inspect(tier)
    elif (folder := kind.folder(tier)) is not None and not folder.exists():
        views = []  # opening the tier would create a store
    else:
        layout = KvLayout(1, (GroupLayout(History(), (4096,), "inspect"),))
        secret = configured_secret(settings().config) if kind.is_shared(tier) else None
        if kind.is_shared(tier) and secret is None:
            raise ConfigError(f"{place}: a shared tier needs its secret; set store.secret_file")
        context = TierContext(layout=layout, key_id=None if secret is None else key_id(secret))
        views = [ScannedTier(kind.open(tier, context), place)]
    if not views and not kind.is_shared(tier):  # a shared tier is empty until the first store
        raise ConfigError(f"{place} holds no store of kind {kind.name}")
    folder = kind.folder(tier)
    return StoreInspector(views, place, {} if folder is None else _classes(folder))


def _classes(root: Path) -> dict[str, str]:
    """Return the lossy class of each model that has a note in `root`, in the form that `StoreInspector` takes."""
    found: dict[str, str] = {}
    for note in notes.read(root):
        match note:
            case {"model": str(model), "of": {"loss": {"codec": str(codec)}}}:
                found[model[:MODEL_DIGITS]] = codec
            case {"model": str(model)}:
                found[model[:MODEL_DIGITS]] = "none"
            case _:
                pass
    return found


def health_of(where: str | Path | TierSettings) -> Health:
    """Return the health of the store in a directory, or of a tier's only store. See `open_store` for `where`.

    Raises:
        ConfigError: there is no such store, a tier has several, or the store is of a kind that keeps no health
            information.
    """
    folder, tier = Path(str(where)), named_tier(where)
    if tier is not None:
        kind = registry.kind_of(tier)
        found = kind.folder(tier)
        if found is None or (found / "rank-1").exists():
            raise ConfigError(f"tier {tier.name!r} has a store for each rank; give the directory of one rank")
        folder = found if kind.view_at(found) is not None else found / "rank-0"
    health = getattr(_view_at(folder), "health", None)
    if health is None:
        raise ConfigError(
            f"the store in {folder} is of a kind that keeps no health information; `kvtier inspect stat` shows what it "
            "holds"
        )
    return health()


def is_sealed_store(where: str | Path | TierSettings) -> bool:
    """Return whether `where` (see `open_store`) is a tier that seals its frames. For a directory, return False."""
    tier = named_tier(where)
    return tier is not None and registry.is_sealed(tier)


def keys_of(file: Path | None, settings: Callable[[], Loaded]) -> Keyring | None:
    """Return the keys of sealed frames from `file`, or else from the settings; None if there are none.

    Raises:
        ConfigError: the keys cannot be read.
    """
    if file is not None:
        return read_file(file)
    try:
        store = settings().config.store
    except ConfigError:  # an inspection works without settings
        return None
    secret = load_secret(store.secret_file) if store.secret_file else store.secret
    source = open_keys(
        file=store.keys_file, command=store.keys_command, text=store.keys.reveal(), secret=secret, tenant=store.tenant
    )
    if source is None:
        return None
    with closing(source):
        return source.keyring


def named_tier(where: str | Path | TierSettings) -> TierSettings | None:
    """Return the tier that `where` names; None if `where` is a path."""
    if isinstance(where, TierSettings):
        return where
    text = str(where)
    is_text = tier_list.is_spec(text) and not Path(text).exists()
    return tier_list.parse(text, shown_place(text)) if is_text else None  # the settings in a spec may be secret


def repair_store(where: str | Path | TierSettings) -> list[str]:
    """Repair defects that prevent a store from opening, such as a missing marker. See `open_store` for `where`.

    Return the repairs as sentences; empty if nothing was wrong.

    Raises:
        ConfigError: nothing can be repaired, there are foreign files, or a process has the store open.
        TierError: the store cannot be read or written.
        OSError: the store cannot be read or written.
    """
    tier = named_tier(where)
    shown = where.name if isinstance(where, TierSettings) else shown_place(str(where))
    if tier is not None:
        tiers = [tier]
    elif Path(str(where)).is_dir():
        kinds = [it for it in registry.built_in() if registry.by_name(it).where == "path"]
        tiers = [tier_list.parse(kind, where=Path(str(where)).absolute()) for kind in kinds]
    else:
        raise ConfigError(f"{shown} is not a directory; allowed here: a store's directory, or KIND:WHERE")
    done = [lines for tier in tiers if (lines := registry.kind_of(tier).repair(tier)) is not None]
    if not done:
        raise ConfigError(f"{shown} holds no kvtier store that can be repaired; nothing was changed")
    return [*dict.fromkeys(chain.from_iterable(done))]


def _view_at(root: Path) -> StoreView:
    kinds = [registry.by_name(name) for name in registry.built_in()]
    for kind in kinds:
        view = kind.view_at(root)
        if view is not None:
            return view
    for kind in kinds:
        if kind.view_at(root / "rank-0") is not None:
            raise ConfigError(
                f"{root} belongs to the {kind.name} tier; allowed here: one of its stores, such as {root / 'rank-0'}, "
                f"or all of them: {tier_list.spec(kind.name, root)}"
            )
    why = "is not a directory" if root.exists() else "does not exist"
    if root.is_dir():
        why = "holds no store that this release of kvtier knows"
    raise ConfigError(f"{root} {why}, so it is not a kvtier store; allowed here: a store's directory, or KIND:WHERE")
