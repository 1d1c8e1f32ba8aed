"""Files of an engine's model and adapters, and the note of its fingerprint beside each store. Used by all engines."""

import importlib
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtier.config.sections import Config
from kvtier.keys.fingerprint import Fingerprint
from kvtier.tier import store_notes as notes
from kvtier.tier.registry import kind_of

logger = logging.getLogger(__name__)


def local_folder(name: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """Folder of a model or adapter: the path `name`, or its entry in the local hub cache; None without either."""
    place = Path(name).expanduser()
    if place.exists():
        return place
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        return Path(hub.snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not installed; not in the cache; no valid hub name
        return None


def adapter_files(folder: Path) -> Iterator[Path]:
    """The weights and the configuration of an adapter."""
    for file in sorted(folder.iterdir()):
        if file.name.startswith(("adapter_", "new_embeddings")) or file.suffix == ".safetensors":
            yield file


def note_fingerprint(config: Config, fingerprint: Fingerprint) -> None:
    """Write the fingerprint's ingredients next to each store, so that the doctor can name differences.

    Runs in its own thread, since a file system may hang. A path that does not exist gets the note at the next start.
    """
    content: dict[str, object] = {"digest": fingerprint.digest.hex(), "of": json.loads(fingerprint.canonical)}

    def run() -> None:
        for tier in config.tiers:
            folder = kind_of(tier).folder(tier)
            try:
                # A directory that is no store of ours, or is damaged, stays as it is.
                if folder is not None and not any(it.level == "error" for it in kind_of(tier).check(tier)):
                    notes.write(folder, "fingerprint", fingerprint.digest, content)
            except OSError as error:
                logger.debug("the fingerprint's note cannot be written to %s: %s", folder, error)

    threading.Thread(target=run, name="kvtier note", daemon=True).start()
