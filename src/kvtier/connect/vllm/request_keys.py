"""Who the chunks of a request are: its key chain, with everything besides tokens that determines the numbers.

salt        from the first token on: tenants who must not share say so with it
adapter     from the first token on: its name, and a digest of its files as they were when it was first used
item        an image or another item, by the identifier that vLLM gives its content, where it begins
embeddings  of a prompt without tokens: a digest for each chunk
epoch       from the first token on, once the cache was reset: nothing from before is found again
"""

import hashlib
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch

from kvtier.connect.vllm.identity import adapter_files, local_folder
from kvtier.connect.vllm.support import reason_against
from kvtier.connect.vllm.vllm_types import LoraRequest, Request, VllmConfig, plain_name
from kvtier.errors import ConfigError, KvError
from kvtier.keys.chain import Chain, Extra
from kvtier.keys.weights import digest_files, home_cache
from kvtier.types import Prefix

logger = logging.getLogger(__name__)

ADAPTERS_MAX = 4096
"""Adapters that are remembered, far more than vLLM keeps in memory."""

EPOCH_BYTES = 16

REASONS_MAX = 100
"""Reasons that are logged; they may name adapters, of which there is no end."""


class NotCacheableError(KvError):
    """Something determines a request's numbers that we cannot identify."""


class RequestKeys:
    """The keys of one growing request; each token is hashed once. Not thread-safe.

    Args:
        root: 32-byte keyed root.
        chunk_tokens: tokens of a chunk.
        extras: everything besides tokens.
    """

    def __init__(self, root: bytes, chunk_tokens: int, extras: Sequence[Extra]) -> None:
        self._root = root
        self._chunk_tokens = chunk_tokens
        self._extras = extras
        self._chain = Chain(root, chunk_tokens, extras)

    def extend(self, all_token_ids: Sequence[int]) -> None:
        """Take note of the request's tokens so far; costs time for the new ones only.

        Args:
            all_token_ids: prompt and output, `Request.all_token_ids`.
        """
        if len(all_token_ids) < self._chain.tokens:
            # Never seen, and not allowed for: but keys of tokens that are no longer there would be lies.
            self._chain = Chain(self._root, self._chunk_tokens, self._extras)
        self._chain.extend(list(all_token_ids[self._chain.tokens :]))

    def prefix(self, tokens: int | None = None) -> Prefix:
        """The full chunks within the leading `tokens`, by default all.

        Raises:
            ValueError: more tokens than were given.
        """
        return self._chain.prefix(tokens)


class Requests:
    """Makes the keys of an engine's requests. Not thread-safe.

    Args:
        root: 32-byte keyed root of the engine (`kvtier.keys.fingerprint.root_key`).
        chunk_tokens: tokens of a chunk.
        config: what the engine was started with.
    """

    def __init__(self, root: bytes, chunk_tokens: int, config: VllmConfig) -> None:
        self._root = root
        self._chunk_tokens = chunk_tokens
        self._config = config
        self._adapters = Adapters(config.lora_config)
        self._epoch = b""
        self._told: set[str] = set()

    def begin(self, request: Request) -> RequestKeys | None:
        """The keys of a request; None: it is neither looked up nor stored, for a reason that is logged once."""
        try:
            extras = self._extras(request)
        except NotCacheableError as error:
            if str(error) not in self._told and len(self._told) < REASONS_MAX:
                self._told.add(str(error))
                logger.warning("requests like %s are not cached: %s", request.request_id, error)
            return None
        return RequestKeys(self._root, self._chunk_tokens, extras)

    def new_epoch(self) -> None:
        """Share nothing with any request that began before."""
        self._epoch = secrets.token_bytes(EPOCH_BYTES)

    def _extras(self, request: Request) -> list[Extra]:
        reason = reason_against(request, self._config)
        if reason:
            raise NotCacheableError(reason)
        extras: list[Extra] = []
        if request.lora_request is not None:
            extras.append(Extra("adapter", self._adapters.identify(request.lora_request)))
        if request.cache_salt:
            extras.append(Extra("salt", request.cache_salt.encode()))
        if self._epoch:
            extras.append(Extra("epoch", self._epoch))
        extras += _items(request)
        extras += self._embeddings(request)
        return extras

    def _embeddings(self, request: Request) -> Iterator[Extra]:
        embeddings: torch.Tensor | None = request.prompt_embeds
        if embeddings is None:
            return
        # In a mixed prompt this says which positions are tokens; the others' tokens are placeholders.
        is_token: Sequence[bool] = request.prompt_is_token_ids or ()
        for start in range(0, embeddings.shape[0], self._chunk_tokens):
            stop = start + self._chunk_tokens
            digest = hashlib.sha256(f"{embeddings.dtype} {tuple(embeddings.shape[1:])}".encode())
            digest.update(bytes(is_token[start:stop]))
            digest.update(_bytes_of(embeddings[start:stop]))
            yield Extra("embeddings", digest.digest(), start)


def _items(request: Request) -> Iterator[Extra]:
    for item in request.mm_features:
        told = [item.modality, item.identifier, item.mm_position.length]
        yield Extra("item", json.dumps(told).encode(), item.mm_position.offset)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(cast("bytes", tensor.detach().cpu().contiguous().view(torch.uint8).numpy())).cast("B")


_Stamp = tuple[tuple[str, int, int, int, int], ...]
"""For each file its name and what tells its contents from others, as far as the file system says without reading it."""


class _Adapter(NamedTuple):
    name: str
    path: str
    folder: Path
    stamp: _Stamp
    identity: bytes


class Adapters:
    """What the adapters in vLLM's memory hold.

    vLLM reads an adapter's files when it is first used, and perhaps again later. So their digest is taken once, and an
    adapter whose files have changed since is not cached any more: nobody can say which of the two vLLM holds. One that
    is loaded again on purpose (`load_inplace`) is looked at again.

    Args:
        settings: `LoRAConfig`, or None.
    """

    def __init__(self, settings: VllmConfig) -> None:
        self._settings = settings
        self._known: OrderedDict[int, _Adapter] = OrderedDict()

    def identify(self, adapter: LoraRequest) -> bytes:
        """What determines an adapter's numbers.

        Raises:
            NotCacheableError: nobody can say; the message tells why.
        """
        name, path = adapter.lora_name, adapter.lora_path
        known = self._known.get(adapter.lora_int_id)
        is_same = known is not None and (known.name, known.path) == (name, path)
        folder = known.folder if known is not None and is_same else local_folder(path, None, None)
        if folder is None or not folder.is_dir():
            raise NotCacheableError(f"the files of adapter {name!r} are not at {path}")
        try:
            stamp = _stamp(folder)
            if known is not None and is_same and known.stamp == stamp:
                return known.identity
            if known is not None and not adapter.load_inplace:
                raise NotCacheableError(f"the files of adapter {name!r} have changed since vLLM loaded it")
            identity = self._identity(adapter, folder)
        except (OSError, ConfigError) as error:
            raise NotCacheableError(f"the files of adapter {name!r} cannot be read: {error}") from error
        self._known[adapter.lora_int_id] = _Adapter(name, path, folder, stamp, identity)
        if len(self._known) > ADAPTERS_MAX:
            self._known.popitem(last=False)
        return identity

    def _identity(self, adapter: LoraRequest, folder: Path) -> bytes:
        digest = digest_files(adapter_files(folder), home_cache()).digest
        dtype = plain_name(getattr(self._settings, "lora_dtype", None))
        modules = getattr(self._settings, "target_modules", None)
        return json.dumps([adapter.lora_name, digest.hex(), dtype, modules, adapter.is_3d_lora_weight]).encode()


def _stamp(folder: Path) -> _Stamp:
    told = [(file.name, file.stat()) for file in adapter_files(folder)]
    if "adapter_config.json" not in {name for name, _ in told}:
        raise ConfigError(f"{folder} holds no adapter_config.json")
    return tuple((name, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns) for name, about in told)
