"""What all engines use of this machine: files of models and adapters, notes beside stores, programs with an engine."""

import fcntl
import importlib
import json
import logging
import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from kvtier.config.sections import Config
from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.secret import model_id
from kvtier.keys.weights import FileVersion, WeightsDigest, checkpoint_files, digest_files, file_versions, home_cache
from kvtier.runtime.secret import configured_secret
from kvtier.tier import store_notes as notes
from kvtier.tier.registry import is_sealed, kind_of

logger = logging.getLogger(__name__)

TURN_S = 900.0
"""How long a process waits while another process of this machine digests a checkpoint."""

_TURN_STEP_S = 0.2


def installed_version(*distributions: str) -> str | None:
    """Version of the first of these packages that is installed; None: none is."""
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


class NotInTimeError(ConfigError):
    """A program with an engine had no answer until its deadline."""


def ask_program(command: Sequence[str], deadline_s: float, allowed: str) -> dict[str, Any]:
    """The last line of a program's output, a JSON object. The program is ended at its deadline.

    Args:
        command: its command line.
        deadline_s: seconds.
        allowed: what the command may be, for messages.

    Raises:
        NotInTimeError: the deadline has passed.
        ConfigError: it cannot be run, or its output has another form.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=deadline_s,
            check=False,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"{command[0]}: {error.strerror or error}; {allowed}") from error
    except subprocess.TimeoutExpired:
        raise NotInTimeError(f"{command[0]}: no answer within {deadline_s:.3g} s; {allowed}") from None
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError, RecursionError):
        end = " ".join(done.stderr.split())[-300:]
        raise ConfigError(f"{command[0]}: exit code {done.returncode}: {end or 'no output'}; {allowed}") from None


def local_folder(name: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """Folder of a model or adapter: the path `name`, or its entry in the local hub cache; None without either."""
    # A name that is too long, of an unknown user's home, or on a file system that is gone is no path.
    with suppress(OSError, RuntimeError):
        place = Path(name).expanduser()
        if place.exists():
            return place
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        return Path(hub.snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not installed; not in the cache; no valid hub name
        return None


def checkpoint_digest(folder: Path, *, is_code_trusted: bool = False) -> WeightsDigest:
    """The digest of a checkpoint's weights.

    Args:
        folder: of the checkpoint; or its file.
        is_code_trusted: the checkpoint's Python files count, too.

    Raises:
        ConfigError: it has no weights, or they cannot be read.
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
    """The version of each file that an engine may read from a checkpoint and that changes numbers.

    These are the weights and their indexes, all settings (``*.json``, which include the model's and the
    quantisation's), and trusted code. Empty without a folder. Take it before the engine loads, and pass it with the
    one after the load, updated by `WeightsDigest.versions`, to `changed_file`.
    """
    if folder is None:
        return {}
    files = [folder] if folder.is_file() else [*folder.glob("*.json")]
    with suppress(ConfigError):  # no weights yet
        files += digested_files(folder, is_code_trusted=is_code_trusted)
    return file_versions(files)


def digested_files(folder: Path, *, is_code_trusted: bool = False) -> list[Path]:
    """The files that `checkpoint_digest` covers.

    Raises:
        ConfigError: the folder has no weights, or cannot be read.
    """
    code = folder.glob("*.py") if is_code_trusted and folder.is_dir() else ()
    return [*checkpoint_files(folder), *sorted(code)]


def adapter_files(folder: Path) -> Iterator[Path]:
    """The weights and the configuration of an adapter."""
    for file in sorted(folder.iterdir()):
        if file.name.startswith(("adapter_", "new_embeddings")) or file.suffix == ".safetensors":
            yield file


def adapter_versions(name: str) -> dict[Path, FileVersion]:
    """The version of each file of an adapter (see `local_folder`); empty without files, or if they cannot be read."""
    folder = local_folder(name, None, None)
    with suppress(OSError):
        return {} if folder is None else file_versions(adapter_files(folder))
    return {}


def private(config: Config) -> Config:
    """The settings without the tiers that outlive the engine or are shared: nobody else could identify its KV."""
    kept = [it for it in config.tiers if not (kind_of(it).persists or kind_of(it).is_shared(it))]
    return replace(config, tiers=tuple(kept))


def note_fingerprint(config: Config, fingerprint: Fingerprint) -> None:
    """Write the fingerprint's ingredients next to each store, so that people and the doctor can name differences.

    A store that seals gets none. A note is named by the model id, which `kvtier inspect` shows and shared stores have
    in their paths.

    Runs in its own thread, since a file system may hang. A path that does not exist gets the note at the next start.
    """

    def run() -> None:
        try:
            model = model_id(configured_secret(config), fingerprint.digest)
        except ConfigError as error:  # the file was damaged after the tiers had opened
            logger.debug("the fingerprint's note cannot be named: %s", error)
            return
        content = {"model": model.hex(), "of": json.loads(fingerprint.canonical)}
        for tier in config.tiers:
            folder = None if is_sealed(tier) else kind_of(tier).folder(tier)
            try:
                # A directory that is no store of ours, or is damaged, stays as it is.
                if folder is not None and not any(it.level == "error" for it in kind_of(tier).check(tier)):
                    notes.write(folder, model, content)
            except OSError as error:
                logger.debug("the fingerprint's note cannot be written to %s: %s", folder, error)

    threading.Thread(target=run, name="kvtier note", daemon=True).start()


@contextmanager
def _in_turn(cache_file: Path | None) -> Generator[None]:
    """Lock out other processes of this machine: the first digests, and the others find the result."""
    if cache_file is None:
        yield
        return
    with ExitStack() as opened:
        try:
            lock = opened.enter_context(cache_file.with_suffix(".lock").open("ab"))
            _lock(lock.fileno(), time.monotonic() + TURN_S)
        except OSError as error:  # a folder of another user, or a file system without locks
            logger.debug("processes of this machine do not take turns at digesting: %s", error)
        yield


def _lock(handle: int, until_s: float) -> None:
    """Lock a file, or give up at a time.

    Raises:
        OSError: the file system cannot.
    """
    while time.monotonic() < until_s:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_TURN_STEP_S)
        else:
            return
