"""Opens an object store from settings."""

import logging
from functools import partial

from kvtier.config.sections import Config
from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import root_key
from kvtier.keys.secret import model_id
from kvtier.layout import KvLayout
from kvtier.observe.metrics import Metrics
from kvtier.runtime.arena import Arena, slots_for
from kvtier.runtime.observers.guards import Guards
from kvtier.runtime.open import open_journal, tier_rules
from kvtier.runtime.rank import close_tiers, common_tiers, open_tiers, threads_of_tiers, tiers_down
from kvtier.runtime.store_secret import found_secret, store_secret
from kvtier.runtime.tier_encoding import closing_keys, forms_of, in_class, open_key_source
from kvtier.runtime.tiered_object_store import ObjectStore
from kvtier.tier.base import Tier

logger = logging.getLogger(__name__)


def open_object_store(
    config: Config, layout: KvLayout, fingerprint_digest: bytes, *, rank: int = 0, ranks: int = 1
) -> ObjectStore:
    """Open the tiers of one rank, for an engine that manages host memory itself.

    Args:
        config: the settings. This function uses `tiers`, `host.staging_bytes`, `host.populate`, `store.secret`,
            `store.secret_file`, `store.loss`, `store.codec`, the keys and the tenant of `store`, `journal` and
            `limits.open_deadline_s`.
        layout: this rank's KV groups; `chunk_tokens` is the engine's page. If groups have no `part`, ranks share no
            objects.
        fingerprint_digest: 32 bytes, `Fingerprint.digest`, the same on every rank.
        rank: number of this rank, from 0.
        ranks: number of ranks.

    Raises:
        ConfigError: there is no tier, or a setting is wrong. Nothing stays open.
        TierError: a required tier cannot be opened. Other tiers may open later.
        RuntimeError: the system cannot start a thread.
    """
    if not config.tiers:
        raise ConfigError(
            "no tier is configured, and an object store itself keeps nothing", setting="tiers", allowed="at least one"
        )
    layout, fingerprint_digest = in_class(config, layout, fingerprint_digest)
    slots = slots_for(layout, config.host.staging_bytes, setting="host.staging_bytes")
    arena = Arena(layout, slots, populate=config.host.populate)
    tiers: dict[str, Tier] = {}
    keys = None
    try:
        secret, flaw = found_secret(config)
        keys = open_key_source(config, secret)
        forms = forms_of(config, keys)
        close = closing_keys(partial(close_tiers, tiers), keys)
        tiers |= open_tiers(config, layout, fingerprint_digest, secret, flaw, arena.memory, rank=rank, ranks=ranks)
        down = tiers_down(tiers)
        # The tiers must be open first, because one of them creates the directory of the secret.
        root = root_key(
            store_secret(config, down, secret, flaw), fingerprint_digest, layout.chunk_tokens, config.store.tenant
        )
        metrics, guards = Metrics(), Guards()
        open_journal(config, [layout], root, metrics, guards)
        if config.store.loss_notice:
            logger.warning("%s", config.store.loss_notice)
        return ObjectStore(
            layout=layout.on_rank(rank, ranks),
            name_root=root,
            model=model_id(secret, fingerprint_digest),
            tiers=tiers,
            rules=tier_rules(config, tuple(tiers)),
            arena=arena,
            forms=forms,
            tier_threads=threads_of_tiers(config),
            common=common_tiers(config),
            down=down,
            metrics=metrics,
            guards=guards,
            on_close=close,
        )
    except BaseException:
        closing_keys(partial(close_tiers, tiers), keys)(5.0)
        arena.close()
        raise
