"""Who a vLLM engine is: the fingerprint of its weights and of every setting that changes a token's KV.

Every process of one engine comes to the same result. The weights' digest covers the files that the engine loaded them
from. Where there are none that can be read, the engine gets a digest of its own: it then shares KV with nobody.

What is not here: the backend and the processor that wrote a page (`pages`: part of every object's name), the rank (part
of it, too), and what belongs to single requests (`requests`).
"""

import fcntl
import hashlib
import importlib
import json
import logging
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtier.config.sections import Config
from kvtier.connect.hf_config import plain
from kvtier.connect.vllm.installed import is_supported, release_of
from kvtier.connect.vllm.vllm_types import VllmConfig, plain_name
from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.weights import WeightsDigest, checkpoint_files, digest_files, home_cache
from kvtier.tier import notes

logger = logging.getLogger(__name__)

LOCAL_FORMATS = frozenset({
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt", "sharded_state",
})  # fmt: skip
"""Load formats that read the files of a checkpoint's folder."""

TURN_S = 900.0
"""How long a process waits for another one of the same machine that digests the same checkpoint."""

_TURN_STEP_S = 0.2


class EngineIdentity(NamedTuple):
    """Who an engine is."""

    fingerprint: Fingerprint
    weights: WeightsDigest | None
    """What the digest cost; None when there is none."""
    is_private: bool
    """The engine's KV is of use to no other one, now or later, and must not be kept below host memory."""
    detail: str
    """Why it is private."""


def identify(config: VllmConfig, engine_version: str) -> EngineIdentity:
    """The fingerprint of an engine, the same in all its processes.

    Args:
        config: what the engine was started with.
        engine_version: vLLM's, such as ``0.32.0``; see `versions.build_of`.

    Raises:
        ConfigError: a field of the model's configuration has no canonical form.
    """
    weights, detail = _weights(config)
    digest = weights.digest if weights is not None else _own_digest(config)
    return EngineIdentity(_fingerprint(config, engine_version, digest), weights, weights is None, detail)


def _fingerprint(config: VllmConfig, engine_version: str, weights: bytes) -> Fingerprint:
    model, cache = config.model_config, config.cache_config
    settings = cast("Mapping[str, object]", model.hf_config.to_dict())
    return Fingerprint(
        weights=weights,
        dtype=plain_name(model.dtype),
        rope={"model_len": model.max_model_len} if _depends_on_length(settings) else {},
        other={
            # What the bytes of a page are, and which numbers are in them, changes from one release to the next.
            "engine": ["vllm", *_release(engine_version)],
            "architectures": plain(model.architectures),
            "config": plain(settings),
            "quantisation": [plain(_words(model.quantization)), plain(_words(model.quantization_config))],
            "code": [plain_name(model.model_impl), model.code_revision],
            "window_off": bool(model.disable_sliding_window),
            "kv": [plain_name(cache.cache_dtype), plain(cache.kv_cache_dtype_skip_layers)],
            "state": [plain_name(cache.mamba_cache_dtype), plain_name(cache.mamba_ssm_cache_dtype)],
            "multimodal": _multimodal(model.multimodal_config),
            # How heads are divided decides what each rank's share holds.
            "ranks": config.parallel_config.tensor_parallel_size,
        },
    )


def _release(version: str) -> tuple[object, ...]:
    return (release_of(version) if is_supported(version) else None) or (version,)


def _multimodal(settings: VllmConfig) -> object:
    """What changes the numbers that an item of given content becomes."""
    if settings is None:
        return None
    names = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method")
    return {name: plain(_words(getattr(settings, name, None))) for name in names}


def _words(value: object) -> object:
    """`value`, or its fields when it is an object of settings."""
    fields = getattr(value, "__dict__", None)
    return value if fields is None or isinstance(value, type) else dict(fields)


def _depends_on_length(settings: Mapping[str, object]) -> bool:
    """Whether rope is scaled by how long the engine lets prompts get: with ``longrope``, long and short factors."""
    return any(
        (name in {"rope_type", "type"} and value in {"longrope", "su"})
        or (isinstance(value, Mapping) and _depends_on_length(cast("Mapping[str, object]", value)))
        for name, value in settings.items()
    )


def _own_digest(config: VllmConfig) -> bytes:
    """32 bytes that all processes of this engine agree on, and no other engine has."""
    transfer = config.kv_transfer_config
    return hashlib.sha256(f"kvtier.own\0{transfer.engine_id}\0{config.instance_id}".encode()).digest()


def _weights(config: VllmConfig) -> tuple[WeightsDigest | None, str]:
    """The digest of the checkpoint; or none, and why."""
    model = config.model_config
    name = str(model.model_weights or model.model)
    load_format = plain_name(config.load_config.load_format)
    if load_format == "dummy":
        return None, "its weights are random (load_format dummy)"
    if load_format not in LOCAL_FORMATS:
        return None, f"load_format {load_format!r} does not read the files of a folder"
    folder = local_folder(name, model.revision, config.load_config.download_dir)
    if folder is None:
        return None, f"the weights of {name} are in no folder of this machine"
    cache_file = home_cache()
    try:
        files = checkpoint_files(folder)
        if model.trust_remote_code and folder.is_dir():
            files += sorted(folder.glob("*.py"))
        with _in_turn(cache_file):
            digest = digest_files(files, cache_file)
    except ConfigError as error:
        return None, f"the weights of {name} cannot be told from others: {error}"
    logger.info(
        "weights of %s: %.1f MB, of which %.1f MB were digested in %.2f s",
        name,
        digest.total_bytes / 1e6,
        digest.hashed_bytes / 1e6,
        digest.seconds,
    )
    return digest, ""


def note_fingerprint(config: Config, fingerprint: Fingerprint) -> None:
    """Leave beside each store what the fingerprint is made of, so that the doctor can name what another one differs in.

    In a thread of its own, because a place may hang. A place that is not there yet gets it at the next start.
    """
    content: dict[str, object] = {"digest": fingerprint.digest.hex(), "of": json.loads(fingerprint.canonical)}

    def run() -> None:
        for tier in (config.directory, config.disk):
            try:
                if tier.path is not None:
                    notes.write(tier.path, "fingerprint", fingerprint.digest, content)
            except OSError as error:
                logger.debug("what the fingerprint is made of cannot be written to %s: %s", tier.path, error)

    threading.Thread(target=run, name="kvtier note", daemon=True).start()


def local_folder(name: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """Where the files of a model or adapter are: at the path `name`, or in the hub's cache on this machine."""
    place = Path(name).expanduser()
    if place.exists():
        return place
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        return Path(hub.snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not installed; not in the cache; no name of the hub's
        return None


@contextmanager
def _in_turn(cache_file: Path | None) -> Generator[None]:
    """One process of this machine after the other: the first one digests, the rest find it done."""
    if cache_file is None:
        yield
        return
    until_s = time.monotonic() + TURN_S
    with cache_file.with_suffix(".lock").open("ab") as lock:
        while not _is_locked(lock.fileno()) and time.monotonic() < until_s:
            time.sleep(_TURN_STEP_S)
        yield


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def adapter_files(folder: Path) -> Iterator[Path]:
    """The files of an adapter that change its numbers: its weights and its configuration."""
    for file in sorted(folder.iterdir()):
        if file.name.startswith(("adapter_", "new_embeddings")) or file.suffix == ".safetensors":
            yield file
