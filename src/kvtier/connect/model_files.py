"""Handles local files for all engines: models, adapters, and the notes in stores."""

import fcntl
import importlib
import logging
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.codec.registry import class_of
from kvtier.config.sections import Config
from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import Fingerprint, digest_of_class, ingredients
from kvtier.keys.secret import model_id
from kvtier.keys.weights import FileVersion, WeightsDigest, checkpoint_files, digest_files, file_versions, home_cache
from kvtier.runtime.store_secret import configured_secret
from kvtier.tier.files import fingerprint_notes as notes
from kvtier.tier.registry import is_sealed, kind_of

logger = logging.getLogger(__name__)

TURN_S = 900.0
"""Seconds that a process waits while another process on this machine digests a checkpoint."""

_TURN_STEP_S = 0.2


def local_folder(name: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """Return where a model or adapter is: at the path `name`, else in the local hub cache; None if in neither."""
    # Checking a path fails if it is too long, in an unknown user's home, or on a file system that has disappeared.
    with suppress(OSError, RuntimeError):
        place = Path(name).expanduser()
        if place.exists():
            return place
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        return Path(hub.snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not installed, not in the cache, or not a valid hub name
        return None


def checkpoint_digest(folder: Path, *, is_code_trusted: bool = False) -> WeightsDigest:
    """Return the digest of a checkpoint's weights.

    Args:
        folder: the checkpoint's folder, or its file.
        is_code_trusted: whether to include the checkpoint's Python files.

    Raises:
        ConfigError: the checkpoint has no weights, or they cannot be read.
    """
    files, cache_file = digested_files(folder, is_code_trusted=is_code_trusted), home_cache()
    with _in_turn(cache_file):
        digest = digest_files(files, cache_file)
    logger.info(
        "weights of %s: %.1f MB, of which %.1f MB were digested in %.2f s",
        folder,
        digest.total_bytes / 1e6,
        digest.hashed_bytes / 1e6,
        digest.seconds,
    )
    return digest


def checkpoint_versions(folder: Path | None, *, is_code_trusted: bool = False) -> dict[Path, FileVersion]:
    """Return the version of each checkpoint file that an engine may read and that affects the model's output.

    These are the weights and their indexes, all settings (``*.json``, including those of the model and quantization),
    and trusted code. Without a folder the result is empty. Call this before and after the engine loads the model.
    Update the second result with `WeightsDigest.versions`, and pass both to `changed_file`.
    """
    if folder is None:
        return {}
    files = [folder] if folder.is_file() else [*folder.glob("*.json")]
    with suppress(ConfigError):  # no weights yet
        files += digested_files(folder, is_code_trusted=is_code_trusted)
    return file_versions(files)


def digested_files(folder: Path, *, is_code_trusted: bool = False) -> list[Path]:
    """Return the files that `checkpoint_digest` covers.

    Raises:
        ConfigError: the folder has no weights, or cannot be read.
    """
    code = folder.glob("*.py") if is_code_trusted and folder.is_dir() else ()
    return [*checkpoint_files(folder), *sorted(code)]


def adapter_files(folder: Path) -> Iterator[Path]:
    """Yield the weight and configuration files of an adapter."""
    for file in sorted(folder.iterdir()):
        if file.name.startswith(("adapter_", "new_embeddings")) or file.suffix == ".safetensors":
            yield file


def adapter_versions(name: str) -> dict[Path, FileVersion]:
    """Return the version of each file of an adapter; empty if there are no files or they cannot be read."""
    folder = local_folder(name, None, None)
    with suppress(OSError):
        return {} if folder is None else file_versions(adapter_files(folder))
    return {}


def private(config: Config) -> Config:
    """Return the settings without tiers that are shared or outlive the engine.

    They are for an engine whose KV no other engine, and no later one, could identify.
    """
    kept = [it for it in config.tiers if not (kind_of(it).persists or kind_of(it).is_shared(it))]
    return replace(config, tiers=tuple(kept))


def note_fingerprint(config: Config, fingerprint: Fingerprint) -> None:
    """Write the fingerprint's ingredients into each store, so that people and `kvtier doctor` can find differences.

    An encrypted store gets no note. The note is named after the model id, which `kvtier inspect` shows and the paths
    of shared stores contain.

    The work runs in its own thread, because a file system may hang. A path that does not exist yet gets its note at
    the next start.
    """
    loss = class_of(config.store.loss)

    def run() -> None:
        try:
            model = model_id(configured_secret(config), digest_of_class(fingerprint.digest, loss))
        except ConfigError as error:  # the secret's file was damaged after the tiers had opened
            logger.debug("the note about the fingerprint cannot be written, because its name is unknown: %s", error)
            return
        content = {"model": model.hex(), "of": ingredients(fingerprint, loss)}
        for tier in config.tiers:
            folder = None if is_sealed(tier) else kind_of(tier).folder(tier)
            try:
                # Leave a directory alone if it is damaged or not a kvtier store.
                if folder is not None and not any(it.level == "error" for it in kind_of(tier).check(tier)):
                    notes.write(folder, model, content)
            except OSError as error:
                logger.debug("the note about the fingerprint cannot be written to %s: %s", folder, error)

    threading.Thread(target=run, name="kvtier note", daemon=True).start()


@contextmanager
def _in_turn(cache_file: Path | None) -> Generator[None]:
    """Let one process on this machine digest at a time. The others then find its digests in the cache file."""
    if cache_file is None:
        yield
        return
    with ExitStack() as opened:
        try:
            lock = opened.enter_context(cache_file.with_suffix(".lock").open("ab"))
            _lock(lock.fileno(), time.monotonic() + TURN_S)
        except OSError as error:  # another user's folder, or a file system without locks
            logger.debug(
                "processes of this machine digest the weights at the same time, because they cannot lock each other "
                "out: %s",
                error,
            )
        yield


def _lock(handle: int, until_s: float) -> None:
    """Lock a file, or give up at `until_s`.

    Raises:
        OSError: the file system cannot lock.
    """
    while time.monotonic() < until_s:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_TURN_STEP_S)
        else:
            return
