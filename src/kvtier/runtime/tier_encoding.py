"""Decides how each tier's objects are stored: with which codec, and whether a seal is required.

An engine with a lossy class (`store.loss`) has its own object names. So each of its tiers may hold lossy copies. A copy
may move from one tier to another, whatever their codecs.
"""

import importlib
import logging
from collections.abc import Callable, Mapping

from kvtier.codec.base import Codec, LossyCodec
from kvtier.codec.frame import Seals, pack_scratch_bytes
from kvtier.codec.lossy import load_kernels
from kvtier.codec.raw import Raw
from kvtier.codec.registry import class_of, coders
from kvtier.config.sections import Config
from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import digest_of_class
from kvtier.keys.key_source import KeySource, open_keys
from kvtier.keys.seal_keys import Keyring, SealKey
from kvtier.keys.secret import Secret
from kvtier.layout import GroupLayout, KvLayout
from kvtier.runtime.adaptive_coding import CodecChoice
from kvtier.runtime.store_secret import within
from kvtier.tier.registry import is_sealed

logger = logging.getLogger(__name__)

RAW = Raw()


class StoredForm:
    """The form in which one tier's objects are stored. Thread-safe.

    Args:
        codec: encodes objects that are written; None for raw.
        keys: the keys of seals. No frame is sealed and no sealed frame can be read if this is None.
        tenant: the engine's tenant.
        is_sealed: whether every frame must have a seal. Nothing is read or written without a key of the tenant.
        choice: chooses raw or coded for each object. All objects are written with the codec if this is None.
        lossy: encodes the parts of each object that it can, and leaves the rest to `codec`. If it is None, all parts
            are stored exactly.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        keys: KeySource | None = None,
        tenant: str = "",
        *,
        is_sealed: bool = False,
        choice: CodecChoice | None = None,
        lossy: LossyCodec | None = None,
    ) -> None:
        self.codec = codec or RAW
        self.lossy = lossy
        self.choice = choice
        self.is_sealed = is_sealed
        self.keys = keys
        self._tenant = tenant

    @property
    def key(self) -> SealKey | None:
        """The key that seals new frames; None if there is none or no seal is required."""
        return self.keys.keyring.sealing(self._tenant) if self.is_sealed and self.keys is not None else None

    @property
    def is_locked(self) -> bool:
        """Whether a seal is required and the tenant has no key."""
        return self.is_sealed and self.key is None

    @property
    def seals(self) -> Seals | None:
        """The keys and rules with which a reader opens sealed frames; None without keys."""
        return None if self.keys is None else Seals(self.keys.keyring, self._tenant, self.is_sealed)

    def scratch_bytes(self, group: GroupLayout) -> int:
        """Return the scratch bytes that a write of an object of `group` takes, or 0 if it is written from its slot."""
        return pack_scratch_bytes(group, self.codec, is_sealed=self.is_sealed)


def open_key_source(config: Config, secret: Secret | None) -> KeySource | None:
    """Open the keys for seals, from the settings or the configured `secret`. Return None if none are required.

    Log an ERROR if a file or command provides no keys in time. The keys are then used once a later read succeeds.

    Raises:
        ConfigError: the package for the seal is missing, or a required tier seals and has no keys in time.
    """
    store, sealing = config.store, [tier for tier in config.tiers if is_sealed(tier)]
    if not sealing and not (store.keys_file or store.keys_command or store.keys):
        return None
    try:
        importlib.import_module("kvtier.codec.seal")
    except ConfigError as error:
        tiers = ", ".join(tier.label for tier in sealing) or "reading sealed objects"
        raise ConfigError(f"{error} (needed by {tiers}); or set the tiers' seal to off") from error
    deadline_s = config.limits.open_deadline_s

    def first(read: Callable[[], Keyring]) -> Keyring:
        try:
            return within(deadline_s, read, "kvtier keys")
        except (ConfigError, OSError) as caught:
            name = "store.keys_file" if store.keys_file is not None else "store.keys_command"
            late = ConfigError(f"gave no keys within {deadline_s:g} s", setting=name)
            error = late if isinstance(caught, TimeoutError) else caught
            if any(tier.required for tier in sealing):
                raise error from None
            logger.error("%s; kvtier starts without keys and reads them again every minute", error)  # noqa: TRY400
            return Keyring([])

    return open_keys(
        file=store.keys_file,
        command=store.keys_command,
        text=store.keys.reveal(),
        secret=secret,
        tenant=store.tenant,
        first=first,
    )


def in_class(config: Config, layout: KvLayout, fingerprint_digest: bytes) -> tuple[KvLayout, bytes]:
    """Return the layout and the digest that name the KV of an engine of the class `store.loss`.

    Raises:
        ConfigError: the class cannot be applied to this layout. The message says why.
    """
    loss = config.store.loss
    try:
        layout = layout.of_class(loss)
    except ValueError as error:
        raise ConfigError(str(error), setting="store.loss", value=loss, allowed="none") from error
    return layout, digest_of_class(fingerprint_digest, class_of(loss))


def forms_of(config: Config, keys: KeySource | None) -> Mapping[str, StoredForm]:
    """Return each tier's form, by name. The first call with a lossy class in a process may compile for seconds.

    Raises:
        ConfigError: the package of a codec is missing.
    """
    if config.tiers and config.store.loss != "none":
        load_kernels()  # now, rather than later in a thread that encodes, or decodes another engine's objects
    forms: dict[str, StoredForm] = {}
    for tier in config.tiers:
        codec, lossy = coders(config.codec_of(tier))
        # A lossy codec saves capacity, which matters however fast the tier is.
        is_fixed = codec.id == RAW.id or lossy is not None
        choice = None if is_fixed else CodecChoice(codec, tier.read_threads, tier.write_threads)
        forms[tier.name] = StoredForm(
            codec, keys, config.store.tenant, is_sealed=is_sealed(tier), choice=choice, lossy=lossy
        )
    if locked := ", ".join(name for name, form in forms.items() if form.is_locked):
        logger.warning(
            "%s has no key that seals; until it has one, nothing is found or stored (tiers that seal: %s)",
            f"tenant {config.store.tenant!r}" if config.store.tenant else "the engine, which has no tenant,",
            locked,
        )
    return forms


def locked_by(config: Config, keys: KeySource | None) -> str:
    """Describe the missing key if a tier requires seals and the tenant has no key that seals; else return empty."""
    has_key = keys is not None and keys.keyring.sealing(config.store.tenant) is not None
    is_locked = not has_key and any(map(is_sealed, config.tiers))
    return "the tenant has no key (store.keys_file, store.tenant)" if is_locked else ""


def closing_keys(close: Callable[[float], None], keys: KeySource | None) -> Callable[[float], None]:
    """Return a function that stops reading keys and then calls `close`."""

    def both(deadline_s: float) -> None:
        if keys is not None:
            keys.close()
        close(deadline_s)

    return both
