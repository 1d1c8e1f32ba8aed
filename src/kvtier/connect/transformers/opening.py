"""From a model and settings to an open session: everything that depends on what the model is right now."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.config.loader import load
from kvtier.config.sections import Config, find, find_section
from kvtier.connect.transformers import identity
from kvtier.connect.transformers.caches import CacheShape
from kvtier.connect.transformers.copier import CacheCopier, host_page_lock
from kvtier.connect.transformers.restore import Restorer
from kvtier.connect.transformers.support import inspect_cache
from kvtier.connect.transformers.upstream import Model
from kvtier.connect.transformers.waiting import Waiting
from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.weights import WeightsDigest, home_cache
from kvtier.layout import KvLayout
from kvtier.runtime import open as runtime
from kvtier.runtime.base import Session
from kvtier.runtime.recorder import Recorder

logger = logging.getLogger(__name__)

_ORIGIN = "a keyword of attach"

_ALIGNMENT = 1
"""The library resumes at any token, so a chunk may have any number of them."""


CHUNKS_AT_ONCE = 32
"""Chunks that are scattered at the same time, each held by a thread that mostly sleeps. Their layers are brought in the
model's order, so that many chunks mean that the first layers are there early."""


@dataclass(frozen=True, slots=True)
class Opened:
    """One model as it is now, and the session that serves it."""

    shape: CacheShape
    layout: KvLayout
    session: Session
    waiting: Waiting
    restorer: Restorer
    root: bytes
    """Where every key chain of this model begins."""
    watch: identity.Watch
    """Shows that the model has changed since."""
    fingerprint: Fingerprint
    weights: WeightsDigest
    recorder: Recorder | None


def settled(config: Config | None, directory: Path | str | None, settings: dict[str, object]) -> Config:
    """The settings of one attachment.

    Args:
        config: all settings, or None for those of the file that KVTIER_CONFIG names and of the environment.
        directory: overrides ``directory.path``.
        settings: further ones, named like ``host__capacity_bytes``; they win.

    Raises:
        ConfigError: an unknown name or a value that is not allowed.
    """
    chosen = load().config if config is None else config
    named = dict(settings)
    if directory is not None:
        if "directory__path" in named:
            raise ConfigError("directory and directory__path are both given; allowed: one of them")
        named["directory__path"] = Path(directory)
    for name, value in named.items():
        section, _, key = name.partition("__")
        find(find_section(section, _ORIGIN), key, _ORIGIN)
        part = replace(getattr(chosen, section), **{key: value})
        chosen = replace(chosen, **{section: part})
    return chosen


def open_model(model: Model, config: Config, *, checkpoint: Path | None, revision: str, epoch: int) -> Opened:
    """Look at the model, digest its weights, and open a session for it.

    Raises:
        UnsupportedModelError: the model cannot be served.
        ConfigError: a setting cannot be used.
    """
    watch = identity.Watch(model)
    shape = inspect_cache(model)
    layout = shape.layout(runtime.choose_chunk_tokens(config.store.chunk_tokens, _ALIGNMENT))
    weights = identity.weights_digest(model, checkpoint, home_cache() if checkpoint else None)
    logger.info(
        "weights of %s: %.1f MB, of which %.1f MB were digested in %.2f s",
        type(model).__name__,
        weights.total_bytes / 1e6,
        weights.hashed_bytes / 1e6,
        weights.seconds,
    )
    dtype = next(shape.layers).dtype
    fingerprint = identity.fingerprint(model, weights.digest, revision=revision, epoch=epoch, dtype=dtype)
    copier = CacheCopier(shape, layout)
    page_lock = host_page_lock(shape, config.host.page_lock)
    limits = replace(config.limits, scatters_in_flight=max(config.limits.scatters_in_flight, CHUNKS_AT_ONCE))
    parts = runtime.open_session(
        replace(config, limits=limits),
        layout,
        fingerprint.digest,
        copier,
        page_lock=page_lock,
        copy_threads=CHUNKS_AT_ONCE,
    )
    waiting = Waiting(parts.session, copier)
    restorer = Restorer(
        parts.session,
        copier,
        waiting,
        shape,
        probe_deadline_s=config.limits.probe_deadline_s,
        load_deadline_s=config.limits.load_deadline_s,
    )
    return Opened(
        shape, layout, parts.session, waiting, restorer, parts.root, watch, fingerprint, weights, parts.recorder
    )
