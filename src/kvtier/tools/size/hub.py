"""Find the config.json of a model on the Hugging Face Hub: in the local cache, or by download on request."""

import importlib
import re
import threading
from pathlib import Path
from typing import Any

from kvtier.config.value_types import through_proxy
from kvtier.errors import ConfigError
from kvtier.tools.size import catalogue

FILE = "config.json"
DEADLINE_S = 15.0
"""Time limit of the whole download, a file of a few kilobytes, in seconds."""
_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def cached(name: str) -> Path | None:
    """Return the model's config.json in the Hub's local cache; None if it is absent or huggingface_hub is missing."""
    if not _NAME.fullmatch(name):
        return None
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        found = hub.try_to_load_from_cache(name, FILE)
    except (ImportError, ValueError):  # not installed, or not a valid Hub name
        return None
    return Path(found) if isinstance(found, str) else None


def fetch(name: str) -> None:
    """Download only the model's config.json to the local cache of the Hub.

    A model that is in the catalogue or in a local file is not fetched.

    Raises:
        ConfigError: the name is not a Hub name, huggingface_hub is missing, or the download fails or takes too long.
    """
    if catalogue.find(name) is not None or Path(name).exists():
        return
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--fetch: {name[:200]!r} is not a name of the Hub; allowed: ORG/NAME")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        messages: Any = importlib.import_module("huggingface_hub.utils.logging")
    except ImportError as error:
        raise ConfigError(
            "--fetch needs huggingface_hub, which is not installed: pip install huggingface_hub (the extra "
            f"transformers brings it), or {by_hand(name)}"
        ) from error
    messages.set_verbosity_error()  # otherwise it prints a line per attempt
    failed = [f"no answer within {DEADLINE_S:g} s"]

    def run() -> None:
        try:
            hub.hf_hub_download(name, FILE, etag_timeout=DEADLINE_S / 2)
            failed.clear()
        except Exception as error:  # noqa: BLE001 - the library, its HTTP client or the file system may raise anything
            failed[:] = str(error).strip().splitlines()[:1] or [type(error).__name__]

    # The library retries for longer than a command may wait. It runs in a daemon thread, which does not delay the exit.
    thread = threading.Thread(target=run, name="kvtier fetch", daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if why := failed[:]:  # a copy, because the thread may still end
        raise ConfigError(
            f"--fetch: no {FILE} of {name} from the Hub{through_proxy(str(hub.constants.ENDPOINT))} ({why[0]}); "
            f"use {by_hand(name)}"
        )


def by_hand(name: str) -> str:
    """Explain how to get the file without kvtier."""
    return f"`hf download {name} {FILE}` on a machine with network, then the path of that file instead of the name"


def advice(name: str) -> str:
    """Explain how to get an unknown model; empty if the name cannot be a Hub name."""
    return f", or --fetch (gets its {FILE} from the Hub), or {by_hand(name)}" if _NAME.fullmatch(name) else ""
