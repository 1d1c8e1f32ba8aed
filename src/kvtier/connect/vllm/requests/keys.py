"""Makes the chunk keys of requests: the key chain over tokens, plus everything else that determines a request's KV.

salt     from the first token: tenants with different `cache_salt` share nothing. See also `EXACT_SALT`
adapter  from the first token: its name, and a digest of its files at first use
item     at the position of an image or other item: vLLM's identifier, and a digest of its data
epoch    from the first token, after a cache reset or after clearing a salt: earlier KV is not found
weights  from the first token, if they differ from those at the start: a digest of them, or random bytes
"""

import json
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvtier.connect.model_files import adapter_files, local_folder
from kvtier.connect.vllm.checkpoint_reads import AdapterRead
from kvtier.connect.vllm.requests.hints import opts_out
from kvtier.connect.vllm.requests.multimodal_items import Items
from kvtier.connect.vllm.support import looks_ahead, reason_against
from kvtier.connect.vllm.vllm_types import ConfigPart, LoraRequest, Request, VllmConfig, plain_name
from kvtier.errors import ConfigError, KvError
from kvtier.keys.chain import Chain, Extra
from kvtier.keys.weights import FileVersion, digest_files, file_versions, home_cache
from kvtier.layout import EXACT_SALT, Loss
from kvtier.runtime.observers.guards import ends_by_itself

logger = logging.getLogger(__name__)

T = TypeVar("T")

ADAPTERS_MAX = 4096
"""Maximum number of adapters remembered, far more than vLLM keeps in memory."""

EPOCH_BYTES = 16

CLEARED_SALTS_MAX = 4096
"""Maximum number of salts that can be cleared one by one before everything has to be cleared."""

VERSIONS_MAX = 8
"""Maximum number of earlier versions of an adapter's files, with equal content, to remember."""

OLD_ITEMS = (
    "the weights have changed, or may have, and vLLM may still have images or other items of the request that other "
    "weights encoded; call reset_encoder_cache()"
)

REASONS_MAX = 100
"""Maximum number of different reasons to log. Reasons may name adapters, whose number is unbounded."""


class NotCacheableError(KvError):
    """A request's KV depends on something that cannot be identified."""


def loss_of(salt: str | None, loss: Loss) -> Loss:
    """Return the class of the stored KV that a request with this salt may get from an engine of class `loss`."""
    return "none" if (salt or "").startswith(EXACT_SALT) else loss


class KeyMaker:
    """Makes the keys of an engine's requests. One thread makes keys; one other may ask for chains and change epochs.

    Args:
        root: 32-byte keyed root of the engine (`kvtier.keys.fingerprint.root_key`).
        chunk_tokens: tokens of a chunk.
        config: the engine's configuration.
        replaced: called with the name of an adapter that vLLM loads again from other files.
        doubted: called with an item's identifier that turns out to stand for several contents.
        loss: the engine's class.
    """

    def __init__(
        self,
        root: bytes,
        chunk_tokens: int,
        config: VllmConfig,
        replaced: Callable[[str], None] = lambda _: None,
        doubted: Callable[[str], None] = lambda _: None,
        *,
        loss: Loss = "none",
    ) -> None:
        self._root = root
        self._loss: Loss = loss
        self._chunk_tokens = chunk_tokens
        self._config = config
        self.adapters = Adapters(config.lora_config, replaced)
        self._items = Items(doubted)
        self._epochs: tuple[bytes, dict[str, bytes]] = (b"", {})
        """The epoch of all requests, and a second one for each cleared salt. The tuple is replaced and never changed,
        because other threads read it."""
        self._epochs_lock = threading.Lock()
        """Guards changes, so that one of two concurrent changes does not undo the other."""
        self._last_reset = (self._epochs, b"")
        """The epochs before the last reset, and the epoch that it started."""
        self._nap: tuple[tuple[bytes, dict[str, bytes]], bytes] | None = None
        """The epochs before a reset that was part of vLLM's sleep, and the epoch that it started."""
        self.weights = b""
        """Name of the present weights; empty if they are those of the start, or those after the last unknown change."""
        self.are_weights_private = False
        """Whether no other engine gives these weights the same name."""
        self.has_old_items = False
        """Whether vLLM may have items that other weights encoded."""
        self._unknown = b""
        """Random bytes after an unknown change."""
        self._logged: set[str] = set()
        self.refusal = ""
        """Why the last request without keys cannot be cached."""

    def begin(self, request: Request) -> Chain | None:
        """Return a request's key chain, still without tokens, or None if it cannot be cached. Log each reason once."""
        return self._made(request, lambda: self._chain(self._extras(request)))

    def extras(self, request: Request) -> list[Extra] | None:
        """Return what determines a request's KV besides tokens; None if it cannot be cached. Log each reason once."""
        return self._made(request, lambda: self._extras(request))

    def _made(self, request: Request, make: Callable[[], T]) -> T | None:
        """Return the result of `make`, or None if the request cannot be cached or memory is briefly short.

        The log does not mention a request that opts out, because reasons name adapters and items.
        """
        try:
            return make()
        except Exception as error:
            if not isinstance(error, NotCacheableError) and not ends_by_itself(error):
                raise
            if opts_out(request):
                return None
            self.refusal = reason = str(error) or type(error).__name__
        if reason not in self._logged and len(self._logged) < REASONS_MAX:
            self._logged.add(reason)
            logger.warning("request %s is not cached: %s (logged once)", request.request_id, reason)
        return None

    def loaded(self, adapter: LoraRequest) -> None:
        """Identify an adapter that vLLM is about to load. Its files may have changed by the time a request arrives."""
        with suppress(NotCacheableError):
            self.adapters.identify(adapter)

    def chain_of(self, salt: str, adapter: str) -> Chain:
        """Return the key chain of a text request, still without tokens.

        Args:
            salt: the request's `cache_salt`; empty for none.
            adapter: name of an adapter that a request has used before; empty for none.

        Raises:
            NotCacheableError: no request has used an adapter of this name, or the salt demands exact KV.
        """
        return self._chain(self._common(salt, self.adapters.known(adapter)))

    def _chain(self, extras: list[Extra]) -> Chain:
        return Chain(self._root, self._chunk_tokens, extras, looks_ahead=looks_ahead(self._config))

    def new_epoch(self) -> None:
        """Separate all later requests from all earlier ones."""
        with self._epochs_lock:
            self._last_reset = (self._epochs, secrets.token_bytes(EPOCH_BYTES))
            self._epochs = (self._last_reset[1], {})

    def reset_was_sleep(self) -> None:
        """Treat the last reset as part of vLLM's sleep. `awake` undoes it."""
        with self._epochs_lock:
            before, epoch = self._last_reset
            if self._nap is not None and self._nap[1] == before[0]:
                before = self._nap[0]  # it was already asleep
            self._nap = (before, epoch)

    def awake(self) -> None:
        """Undo the reset that was part of vLLM's sleep, unless another reset followed it.

        KV of other weights still has other keys, because these contain the weights' name.
        """
        with self._epochs_lock:
            if self._nap is not None and self._nap[1] == self._epochs[0]:
                epoch, salts = self._nap[0]
                self._epochs = (epoch, salts | self._epochs[1])
            self._nap = None

    @property
    def own(self) -> tuple[bool, set[str]]:
        """Whether other engines have other keys for all requests, and the salts whose requests have others there."""
        epoch, salts = self._epochs
        return bool(epoch or self._unknown) or self.are_weights_private, set(salts)

    def unknown_weights(self) -> None:
        """Separate all later requests from all earlier ones, even if resets are undone."""
        self._unknown, self.weights = secrets.token_bytes(EPOCH_BYTES), b""

    def clear_salt(self, salt: str) -> bool:
        """Separate later requests of `salt` (empty for none) from earlier ones.

        Return False if too many salts are cleared.
        """
        with self._epochs_lock:
            epoch, known = self._epochs
            if salt not in known and len(known) >= CLEARED_SALTS_MAX:
                return False
            self._epochs = (epoch, {**known, salt: secrets.token_bytes(EPOCH_BYTES)})
        return True

    def _extras(self, request: Request) -> list[Extra]:
        # Items come first, because vLLM computes the items of every request and may reuse them for another request.
        digests, unidentified = self._items.identify(request.mm_features)
        reason = reason_against(request, self._config) or unidentified
        reason = reason or (OLD_ITEMS if request.mm_features and self.has_old_items else "")
        if reason:
            raise NotCacheableError(reason)
        adapter = None if request.lora_request is None else self.adapters.identify(request.lora_request)
        extras = self._common(request.cache_salt or "", adapter)
        for item, digest in zip(request.mm_features, digests, strict=True):
            identified = [item.modality, item.identifier, item.mm_position.length, digest.hex()]
            extras.append(Extra("item", json.dumps(identified).encode(), item.mm_position.offset))
        return extras

    def _common(self, salt: str, adapter: bytes | None) -> list[Extra]:
        """Return everything that counts from the first token on.

        Raises:
            NotCacheableError: the salt demands exact KV of an engine with a lossy class.
        """
        if loss_of(salt, self._loss) != self._loss:
            raise NotCacheableError(
                f"its cache_salt begins with {EXACT_SALT!r}, and this engine stores KV with loss ({self._loss})"
            )
        weights = self._unknown + self.weights
        extras = [Extra("weights", weights)] if weights else []
        if adapter is not None:
            extras.append(Extra("adapter", adapter))
        if salt:
            extras.append(Extra("salt", salt.encode("utf-8", "surrogatepass")))  # encoded as a conversation's name is
        epoch, of_salts = self._epochs
        extras += [Extra("epoch", it) for it in (epoch, of_salts.get(salt)) if it]
        return extras


class _Adapter(NamedTuple):
    name: str
    path: str
    folder: Path
    versions: tuple[Mapping[Path, FileVersion], ...]
    """The versions of its files at several times. All versions had the content from which `identity` was made."""
    identity: bytes
    other: Mapping[Path, FileVersion] = {}
    """The last versions with other content. They are kept so that they are digested only once."""


class Adapters:
    """Identities of the adapters in vLLM's memory.

    An adapter's files are digested when its first request arrives. vLLM's workers read them later, perhaps repeatedly.
    Each read is compared with what was digested (`read`). After a difference, the adapter is not cached until it is
    loaded again from files with the digested content. It is also not cached while its files have other content, because
    vLLM may have loaded either. An adapter that is reloaded on purpose (`load_inplace`) gets a new identity.

    Args:
        settings: vLLM's `LoRAConfig`, or None.
        replaced: called with the name of an adapter that gets a new identity.
    """

    def __init__(self, settings: ConfigPart, replaced: Callable[[str], None]) -> None:
        self._settings = settings
        self._replaced = replaced
        self._known: OrderedDict[int, _Adapter] = OrderedDict()
        self._read: OrderedDict[int, Mapping[Path, FileVersion]] = OrderedDict()
        """The versions that the workers read last; empty if they read different files. Both tables forget the least
        recently used adapter."""
        self.mixed: set[int] = set()
        """Adapters of which vLLM's own cache may have blocks that were computed with other files."""

    def known(self, name: str) -> bytes | None:
        """Return the identity of the newest adapter of this name, or None if the name is empty. Any thread may ask.

        Raises:
            NotCacheableError: no request has used an adapter of this name.
        """
        found = [it.identity for it in list(self._known.values()) if it.name == name]
        if name and not found:
            raise NotCacheableError(f"no request has used an adapter named {name[:40]!r}")
        return found[-1] if name else None

    def named(self, number: int) -> tuple[Mapping[Path, FileVersion], ...]:
        """Return the file versions that an adapter's identity stands for; empty if the adapter is unknown."""
        known = self._known.get(number)
        return () if known is None else known.versions

    def read(self, reads: Collection[AdapterRead]) -> set[int]:
        """Process all workers' reads in a step. Return the numbers of adapters that were read from undigested files."""
        doubted: set[int] = set()
        for number in {it.number for it in reads}:
            versions, *others = (it.versions for it in reads if it.number == number)
            # An adapter that kvtier has not identified yet must be read in the versions of its previous read.
            named = self.named(number) or (self._read.get(number, versions),)
            self._read[number] = versions if all(it == versions for it in others) else {}
            self._read.move_to_end(number)
            if self._read[number] not in named:
                doubted.add(number)
        while len(self._read) > ADAPTERS_MAX:
            self._read.popitem(last=False)
        return doubted

    def identify(self, adapter: LoraRequest) -> bytes:
        """Return an adapter's identity: bytes that cover everything that determines its effect on KV.

        Raises:
            NotCacheableError: the adapter cannot be identified. The message says why.
        """
        name, path, number = adapter.lora_name, adapter.lora_path, adapter.lora_int_id
        known = self._known.get(number)
        is_same = known is not None and (known.name, known.path) == (name, path)
        folder = known.folder if known is not None and is_same else local_folder(path, None, None)
        try:
            if folder is None or not folder.is_dir():
                raise NotCacheableError(f"the files of adapter {name!r} are not at {path}")
            versions = file_versions(adapter_files(folder))
            if all(path.name != "adapter_config.json" for path in versions):
                raise NotCacheableError(f"{folder}, of adapter {name!r}, contains no adapter_config.json")
            if known is None or not is_same or versions not in known.versions:
                known = self._digested(adapter, folder, known, versions)
        except (OSError, ConfigError) as error:
            raise NotCacheableError(f"the files of adapter {name!r} cannot be read: {error}") from error
        self._known.move_to_end(number)
        if number in self._read:
            self._read.move_to_end(number)
            if self._read[number] not in known.versions:
                self.mixed.add(number)
                raise NotCacheableError(f"vLLM has not loaded the files of adapter {name!r} that kvtier has identified")
        return known.identity

    def _digested(
        self, adapter: LoraRequest, folder: Path, known: _Adapter | None, versions: Mapping[Path, FileVersion]
    ) -> _Adapter:
        """Digest an adapter's files as they are now, and return its new entry.

        Raises:
            NotCacheableError: the files have changed, and vLLM was not asked to reload the adapter.
        """
        name, number = adapter.lora_name, adapter.lora_int_id
        changed = NotCacheableError(f"the files of adapter {name!r} have changed since kvtier identified them")
        if known is not None and versions == known.other and not adapter.load_inplace:
            raise changed
        digest = digest_files(adapter_files(folder), home_cache())
        dtype = plain_name(getattr(self._settings, "lora_dtype", None))
        modules = getattr(self._settings, "target_modules", None)
        identity = json.dumps([name, digest.digest.hex(), dtype, modules, adapter.is_3d_lora_weight]).encode()
        found = _Adapter(name, adapter.lora_path, folder, (digest.versions,), identity)
        if known is not None and known[:3] == found[:3] and known.identity == identity:
            found = found._replace(versions=(*known.versions[-VERSIONS_MAX:], digest.versions))
        elif known is not None and not adapter.load_inplace:
            self._known[number] = known._replace(other=versions)
            raise changed
        self._known[number] = found
        if known is not None and known.identity != identity:
            self._replaced(name)
        if len(self._known) > ADAPTERS_MAX:
            self._known.popitem(last=False)
        return found
