"""Chunk keys of requests: the key chain over tokens, plus everything else that determines a request's KV.

salt     from the first token: tenants with different `cache_salt` share nothing
adapter  from the first token: its name, and a digest of its files at first use
item     an image or other item: vLLM's identifier of its content, at its position
epoch    from the first token, after a cache reset, or after clearing a salt: KV from before is not found
"""

import json
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtier.connect.local_files import adapter_files, local_folder
from kvtier.connect.vllm.support import looks_ahead, reason_against
from kvtier.connect.vllm.vllm_types import LoraRequest, Request, VllmConfig, plain_name
from kvtier.errors import ConfigError, KvError
from kvtier.keys.chain import Chain, Extra
from kvtier.keys.weights import digest_files, home_cache

logger = logging.getLogger(__name__)

ADAPTERS_MAX = 4096
"""Adapters remembered, far more than vLLM keeps in memory."""

EPOCH_BYTES = 16

CLEARED_SALTS_MAX = 4096
"""Salts that may be cleared one by one until everything is."""

REASONS_MAX = 100
"""Different reasons logged. Reasons may name adapters, whose number is unbounded."""


class NotCacheableError(KvError):
    """A request's KV depends on something that cannot be identified."""


class KeyMaker:
    """Makes the keys of an engine's requests. One thread makes keys; one other may ask for chains, and change epochs.

    Args:
        root: 32-byte keyed root of the engine (`kvtier.keys.fingerprint.root_key`).
        chunk_tokens: tokens of a chunk.
        config: the engine's.
        replaced: called with the name of an adapter that vLLM loads again from other files.
    """

    def __init__(
        self, root: bytes, chunk_tokens: int, config: VllmConfig, replaced: Callable[[str], None] = lambda _: None
    ) -> None:
        self._root = root
        self._chunk_tokens = chunk_tokens
        self._config = config
        self._adapters = Adapters(config.lora_config, replaced)
        self._epochs: tuple[bytes, dict[str, bytes]] = (b"", {})
        """Of all requests, and of those with cleared salts. Replaced as a whole, because other threads read it."""
        self._epochs_lock = threading.Lock()
        """Held for a change: one of two at once must not undo the other."""
        self._logged: set[str] = set()
        self.refusal = ""
        """Why the last request without keys cannot be cached."""

    def begin(self, request: Request) -> Chain | None:
        """The key chain of a request, still without tokens; None if it cannot be cached. Logs each reason once."""
        extras = self.extras(request)
        return None if extras is None else self._chain(extras)

    def extras(self, request: Request) -> list[Extra] | None:
        """What determines a request's KV besides its tokens; None if it cannot be cached. Logs each reason once."""
        try:
            return self._extras(request)
        except NotCacheableError as error:
            self.refusal = str(error)
            if str(error) not in self._logged and len(self._logged) < REASONS_MAX:
                self._logged.add(str(error))
                logger.warning("request %s is not cached: %s (logged once)", request.request_id, error)
            return None

    def loaded(self, adapter: LoraRequest) -> None:
        """Identify an adapter that vLLM is about to load: its files may be others when a request comes."""
        with suppress(NotCacheableError):
            self._adapters.identify(adapter)

    def chain_of(self, salt: str, adapter: str) -> Chain:
        """The key chain of a request of text, still without tokens.

        Args:
            salt: its `cache_salt`; empty: none.
            adapter: name of its adapter, which a request has used before; empty: none.

        Raises:
            NotCacheableError: no request has used an adapter of this name.
        """
        return self._chain(self._common(salt, self._adapters.known(adapter)))

    def _chain(self, extras: list[Extra]) -> Chain:
        return Chain(self._root, self._chunk_tokens, extras, looks_ahead=looks_ahead(self._config))

    def new_epoch(self) -> None:
        """Separate all later requests from all earlier ones."""
        with self._epochs_lock:
            self._epochs = (secrets.token_bytes(EPOCH_BYTES), {})

    def clear_salt(self, salt: str) -> bool:
        """Separate later requests of `salt` (empty: those without one) from earlier ones; False if that many are."""
        with self._epochs_lock:
            epoch, known = self._epochs
            if salt not in known and len(known) >= CLEARED_SALTS_MAX:
                return False
            self._epochs = (epoch, {**known, salt: secrets.token_bytes(EPOCH_BYTES)})
        return True

    def _extras(self, request: Request) -> list[Extra]:
        reason = reason_against(request, self._config)
        if reason:
            raise NotCacheableError(reason)
        adapter = None if request.lora_request is None else self._adapters.identify(request.lora_request)
        extras = self._common(request.cache_salt or "", adapter)
        for item in request.mm_features:
            identified = [item.modality, item.identifier, item.mm_position.length]
            extras.append(Extra("item", json.dumps(identified).encode(), item.mm_position.offset))
        return extras

    def _common(self, salt: str, adapter: bytes | None) -> list[Extra]:
        """Everything that counts from the first token on."""
        extras: list[Extra] = []
        if adapter is not None:
            extras.append(Extra("adapter", adapter))
        if salt:
            extras.append(Extra("salt", salt.encode("utf-8", "surrogatepass")))  # as a session's name
        epoch, of_salts = self._epochs
        extras += [Extra("epoch", it) for it in (epoch, of_salts.get(salt)) if it]
        return extras


_FileStamps = tuple[tuple[str, int, int, int, int], ...]
"""Stamp of each file: name, inode, size, modification time, change time."""


class _Adapter(NamedTuple):
    name: str
    path: str
    folder: Path
    stamps: _FileStamps
    identity: bytes


class Adapters:
    """Identities of the adapters in vLLM's memory.

    Files of an adapter are read at first use, and perhaps again later. So their digest is taken once. After its files
    change an adapter is no longer cached, because vLLM may hold either version. An adapter that is reloaded on purpose
    (`load_inplace`) is digested again.

    Args:
        settings: `LoRAConfig`, or None.
        replaced: called with the name of an adapter that is digested again.
    """

    def __init__(self, settings: VllmConfig, replaced: Callable[[str], None]) -> None:
        self._settings = settings
        self._replaced = replaced
        self._known: OrderedDict[int, _Adapter] = OrderedDict()

    def known(self, name: str) -> bytes | None:
        """The identity of the newest adapter of this name; None for no name. Any thread.

        Raises:
            NotCacheableError: no request has used it.
        """
        found = [it.identity for it in list(self._known.values()) if it.name == name]
        if name and not found:
            raise NotCacheableError(f"no request has used an adapter of the name {name[:40]!r}")
        return found[-1] if name else None

    def identify(self, adapter: LoraRequest) -> bytes:
        """Everything that determines an adapter's effect on KV.

        Raises:
            NotCacheableError: the adapter cannot be identified; the message says why.
        """
        name, path = adapter.lora_name, adapter.lora_path
        known = self._known.get(adapter.lora_int_id)
        is_same = known is not None and (known.name, known.path) == (name, path)
        folder = known.folder if known is not None and is_same else local_folder(path, None, None)
        if folder is None or not folder.is_dir():
            raise NotCacheableError(f"the files of adapter {name!r} are not at {path}")
        try:
            stamps = _stamps(folder)
            if known is not None and is_same and known.stamps == stamps:
                return known.identity
            if known is not None and not adapter.load_inplace:
                raise NotCacheableError(f"the files of adapter {name!r} have changed since vLLM loaded it")
            digest = digest_files(adapter_files(folder), home_cache()).digest
        except (OSError, ConfigError) as error:
            raise NotCacheableError(f"the files of adapter {name!r} cannot be read: {error}") from error
        dtype = plain_name(getattr(self._settings, "lora_dtype", None))
        modules = getattr(self._settings, "target_modules", None)
        identity = json.dumps([name, digest.hex(), dtype, modules, adapter.is_3d_lora_weight]).encode()
        self._known[adapter.lora_int_id] = _Adapter(name, path, folder, stamps, identity)
        if known is not None and known.identity != identity:
            self._replaced(name)
        if len(self._known) > ADAPTERS_MAX:
            self._known.popitem(last=False)
        return identity


def _stamps(folder: Path) -> _FileStamps:
    found = [(file.name, file.stat()) for file in adapter_files(folder)]
    if "adapter_config.json" not in {name for name, _ in found}:
        raise ConfigError(f"{folder} holds no adapter_config.json")
    return tuple((name, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns) for name, about in found)
