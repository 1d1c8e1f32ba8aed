"""Opens a session for a model in its current state, with its KV layout, fingerprint and copier."""

import logging
import secrets
from dataclasses import dataclass
from pathlib import Path

from kvtier.config.sections import Config
from kvtier.connect.model_files import private
from kvtier.connect.transformers import identity
from kvtier.connect.transformers.caches import CacheShape, Model
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.connect.transformers.open_requests import OpenRequests
from kvtier.connect.transformers.restore import Restorer
from kvtier.connect.transformers.support import inspect_cache
from kvtier.device.page_lock import cuda_page_lock
from kvtier.errors import UnsupportedModelError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.weights import WeightsDigest, home_cache
from kvtier.layout import KvLayout
from kvtier.runtime import open as runtime
from kvtier.runtime.observers.trace_recorder import Recorder
from kvtier.runtime.session import Session

logger = logging.getLogger(__name__)

_ALIGNMENT = 1
"""The library resumes at any token, so a chunk may have any number of tokens."""


@dataclass(frozen=True, slots=True)
class ModelSession:
    """A session for a model in one state. After a change of the model, a new one replaces it."""

    shape: CacheShape
    layout: KvLayout
    session: Session
    requests: OpenRequests
    restorer: Restorer
    root: bytes
    """The root of the model's key chains."""
    watch: identity.ModelWatch
    """Detects changes of the model."""
    fingerprint: Fingerprint
    weights: WeightsDigest
    recorder: Recorder | None


def open_model(model: Model, config: Config, *, checkpoint: Path | None, revision: str) -> ModelSession:
    """Inspect the model, digest its weights, and open a session.

    Raises:
        UnsupportedModelError: the model cannot be served.
        ConfigError: a setting cannot be used.
    """
    watch = identity.ModelWatch(model)
    shape = inspect_cache(model)
    layout = shape.layout(runtime.choose_chunk_tokens(config.store.chunk_tokens, _ALIGNMENT))
    try:
        weights = identity.weights_digest(model, checkpoint, home_cache() if checkpoint else None)
    except UnsupportedModelError as error:
        if checkpoint is None:
            raise
        logger.warning("KV is kept in host memory only, because the weights cannot be identified: %s", error)
        weights = WeightsDigest(secrets.token_bytes(32), 0, 0, 0.0)
        config = private(config)
    logger.info(
        "weights of %s: %.1f MB, of which %.1f MB were digested in %.2f s",
        type(model).__name__,
        weights.total_bytes / 1e6,
        weights.hashed_bytes / 1e6,
        weights.seconds,
    )
    dtype = next(shape.layers).dtype
    fingerprint = identity.fingerprint(model, weights.digest, revision=revision, dtype=dtype)
    copier = CacheCopier(shape, layout)
    has_cuda = any(layer.device.type == "cuda" for layer in shape.layers)
    opened = runtime.open_session(
        config,
        layout,
        fingerprint.digest,
        copier,
        page_lock=cuda_page_lock(config.host.page_lock) if has_cuda else None,
    )
    requests = OpenRequests(opened.session, copier)
    restorer = Restorer(
        opened.session,
        requests,
        shape,
        probe_deadline_s=sum(tier.probe_deadline_s for tier in config.tiers),
        load_deadline_s=config.limits.load_deadline_s,
    )
    return ModelSession(
        shape, layout, opened.session, requests, restorer, opened.root, watch, fingerprint, weights, opened.recorder
    )
