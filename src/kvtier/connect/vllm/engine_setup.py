"""Determines the settings and the identity of an engine at its start. All of its processes agree on both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvtier.config.loader import Loaded, flat, load, overridden
from kvtier.config.sections import Config
from kvtier.config.tier_list import SettingOrigin
from kvtier.connect.model_files import private
from kvtier.connect.vllm import installed_engine, support
from kvtier.connect.vllm.checkpoint_reads import doubt
from kvtier.connect.vllm.geometry import DcpShards, Geometry
from kvtier.connect.vllm.identity import EngineIdentity, identify
from kvtier.connect.vllm.rank_parts import stage_ranks, token_share
from kvtier.connect.vllm.vllm_logging import follow_engine
from kvtier.connect.vllm.vllm_types import KvCacheConfig, VllmConfig
from kvtier.errors import ConfigError, UnsupportedModelError


def settings_of(extra: Mapping[str, object], base: Loaded, origin: str = "kv_connector_extra_config") -> Loaded:
    """Return `base`, overridden by `extra`, the settings that vLLM passes. Errors name `origin` as their source.

    Settings may be nested by section, or have dotted names such as ``host.evictor``. ``{"tiers": [...]}`` replaces the
    list of tiers, and ``{"tiers.NAME.key": …}`` sets one value of a tier.

    Raises:
        ConfigError: a setting is unknown, given in both forms, or invalid. The message names it and its origin.
    """
    return overridden(base, flat(extra, origin), SettingOrigin("", origin))


def check_start(vllm_config: VllmConfig) -> tuple[Config, str]:
    """Check everything that does not depend on the KV cache. Return the settings and vLLM's version.

    Raises:
        ConfigError: a setting is wrong, or this release of vLLM is not supported.
        UnsupportedModelError: the engine cannot be served correctly.
    """
    loaded = settings_of(vllm_config.kv_transfer_config.kv_connector_extra_config or {}, load())
    config = loaded.config
    support.check_role(vllm_config.kv_transfer_config.kv_role, config.store.write_policy)
    support.check_settings(config, loaded.origins, loaded.file, is_start=True)
    version = installed_engine.check_release()
    support.check_engine(vllm_config)
    return config, version


class WorkerFacts(NamedTuple):
    """What a worker reports to the others at start, before any of them allocates host memory."""

    fingerprint: bytes
    """Digest of the engine's identity, as this worker sees it."""
    doubt: str
    """Why the worker may have read files other than those that it identified; empty if there is no doubt."""
    shape: str
    """The division into chunks and pages, which must be equal on all workers (`Geometry.shape`)."""
    layers: tuple[int, ...]
    """Number of layers of each KV group on this rank."""
    token_share: tuple[int, int] = (0, 1)
    """Index of the worker's token share, and number of shares, according to vLLM's groups of ranks
    (`rank_parts.token_share`)."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Settings and identity of an engine, equal in all its processes."""

    vllm_config: VllmConfig
    kv_cache_config: KvCacheConfig
    config: Config
    geometry: Geometry
    identity: EngineIdentity
    role: str
    """`kv_role`: ``kv_both``, ``kv_producer`` for a prefill engine, or ``kv_consumer`` for a decode engine."""
    workers: tuple[WorkerFacts, ...] = ()
    """Facts of the workers, by rank; empty outside the workers."""

    @staticmethod
    def of(vllm_config: VllmConfig, kv_cache_config: KvCacheConfig) -> "EngineSetup":
        """Check and identify an engine as this process sees it. `identified_as` later sets the agreed identity.

        Raises:
            ConfigError: a setting is wrong, or this release of vLLM is not supported.
            UnsupportedModelError: the engine cannot be served correctly.
        """
        config, version = check_start(vllm_config)
        follow_engine(config.log.level)
        shards = DcpShards.of(vllm_config, config.store.token_shares)
        geometry = Geometry.of(kv_cache_config, config.store.chunk_tokens, shards)
        identified = identify(vllm_config, version, geometry.shares)
        role = vllm_config.kv_transfer_config.kv_role
        return EngineSetup(vllm_config, kv_cache_config, config, geometry, identified, role)

    def identified_as(self, identified: EngineIdentity) -> "EngineSetup":
        """Return this engine with the identity that all of its workers agree on."""
        config = private(self.config) if identified.is_private else self.config
        return replace(self, config=config, identity=identified)

    @property
    def ranks(self) -> int:
        """Number of the engine's workers."""
        return int(self.vllm_config.parallel_config.pipeline_parallel_size) * self.stage_ranks

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""
        return self.vllm_config.parallel_config.rank % self.ranks

    @property
    def stage_ranks(self) -> int:
        """Number of workers in a pipeline stage."""
        return stage_ranks(self.vllm_config.parallel_config)

    @property
    def first_layers(self) -> list[int]:
        """Number of layers of each KV group in the pipeline stages before this worker's."""
        before = [it.layers for it in self.workers[: self.rank - self.rank % self.stage_ranks : self.stage_ranks]]
        return [sum(counts) for counts in zip([0] * len(self.geometry.groups), *before, strict=True)]

    def facts(self, token_share: tuple[int, int] = (0, 1)) -> WorkerFacts:
        """Return what this worker reports to the others."""
        own, geometry = self.identity, self.geometry
        detail = own.detail or doubt(self.vllm_config, own.versions)
        return WorkerFacts(own.fingerprint.digest, detail, geometry.shape, geometry.layer_counts, token_share)

    def agreed(self, workers: Sequence[WorkerFacts | None]) -> "EngineSetup":
        """Return this engine with the facts of all workers, and with the identity on which they agree.

        The identity becomes private (`EngineIdentity.is_private`) if a worker may have read files other than those
        identified, or if workers have identified different weights.

        Args:
            workers: facts of all ranks, by rank; None for a rank that has failed.

        Raises:
            ConfigError: a worker has failed.
            UnsupportedModelError: workers divide the KV in different ways. The message contains both shapes.
        """
        known = [it for it in workers if it is not None]
        if len(known) < len(workers):
            raise ConfigError(f"rank {workers.index(None)} has failed to start; its own message says why")
        for rank, it in enumerate(known):
            like = rank - rank % self.stage_ranks if it.shape == known[0].shape else 0
            other = known[like]
            if (it.shape, it.layers) != (other.shape, other.layers):
                raise UnsupportedModelError(
                    f"ranks {like} and {rank} divide the KV differently. Rank {like}: layers per KV group "
                    f"{', '.join(map(str, other.layers))}; {other.shape}. Rank {rank}: layers per KV group "
                    f"{', '.join(map(str, it.layers))}; {it.shape}. Serve the model without kvtier"
                )
            share = token_share(self.vllm_config.parallel_config, rank)
            if it.token_share != share:
                raise UnsupportedModelError(
                    f"rank {rank} holds token share {it.token_share[0]} of {it.token_share[1]} according to vLLM's "
                    f"groups of ranks, but {share[0]} of {share[1]} according to its configuration. Serve the model "
                    "without kvtier"
                )
        detail = next((it.doubt for it in known if it.doubt), "")
        if len({it.fingerprint for it in known}) > 1 and not detail:
            detail = "its workers have identified different weights"
        own = self.identity
        identity = own.made_private(self.vllm_config, detail) if detail else own
        return replace(self.identified_as(identity), workers=tuple(known))
