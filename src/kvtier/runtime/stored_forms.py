"""How the objects of each tier are stored: the codec, and whether a seal is demanded."""

import importlib
import logging
from collections.abc import Callable, Mapping

from kvtier.codec.base import Codec
from kvtier.codec.frame import Seals, seal_scratch_bytes
from kvtier.codec.raw import Raw
from kvtier.codec.registry import by_name
from kvtier.config.sections import Config
from kvtier.errors import ConfigError
from kvtier.keys.key_source import KeySource, open_keys
from kvtier.keys.keyring import Keyring, SealKey
from kvtier.keys.secret import Secret
from kvtier.layout import GroupLayout
from kvtier.runtime.codec_choice import CodecChoice
from kvtier.runtime.secret import within
from kvtier.tier.registry import is_sealed

logger = logging.getLogger(__name__)

RAW = Raw()


class StoredForm:
    """How the objects of one tier are stored. Thread-safe.

    Args:
        codec: encodes what is written; None: raw.
        keys: of seals; None: no frame is sealed, and sealed ones cannot be read.
        tenant: the engine's.
        is_sealed: a seal is demanded of every frame. Without a key of the tenant nothing is read or written.
        choice: of raw or coded for each object; None: all are written with the codec.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        keys: KeySource | None = None,
        tenant: str = "",
        *,
        is_sealed: bool = False,
        choice: CodecChoice | None = None,
    ) -> None:
        self.codec = codec or RAW
        self.choice = choice
        self.is_sealed = is_sealed
        self.keys = keys
        self._tenant = tenant

    @property
    def key(self) -> SealKey | None:
        """The key that seals what is written now."""
        return self.keys.keyring.sealing(self._tenant) if self.is_sealed and self.keys is not None else None

    @property
    def is_locked(self) -> bool:
        """Whether a seal is demanded and the tenant has no key."""
        return self.is_sealed and self.key is None

    @property
    def seals(self) -> Seals | None:
        """The seals that a reader opens."""
        return None if self.keys is None else Seals(self.keys.keyring, self._tenant, self.is_sealed)

    def scratch_bytes(self, group: GroupLayout) -> int:
        """Scratch memory to write an object of `group`; 0: it is written from its slot."""
        return seal_scratch_bytes(group, self.codec, is_sealed=self.is_sealed)


def open_key_source(config: Config, secret: Secret | None) -> KeySource | None:
    """The keys that the settings or the configured `secret` give, to seal and to read; None: none are needed.

    A file or command that gives no keys in time is an ERROR in the log, and gives them once a later reading succeeds.

    Raises:
        ConfigError: the package for the seal is missing, or a required tier seals and there are no keys in time.
    """
    store, sealing = config.store, [tier for tier in config.tiers if is_sealed(tier)]
    if not sealing and not (store.keys_file or store.keys_command or store.keys):
        return None
    try:
        importlib.import_module("kvtier.codec.seal")
    except ConfigError as error:
        tiers = ", ".join(tier.label for tier in sealing) or "reading sealed objects"
        raise ConfigError(f"{error}, for {tiers}; or set the tiers' seal to off") from error
    deadline_s = config.limits.open_deadline_s

    def first(read: Callable[[], Keyring]) -> Keyring:
        try:
            return within(deadline_s, read, "kvtier keys")
        except (ConfigError, OSError) as caught:
            name = "store.keys_file" if store.keys_file is not None else "store.keys_command"
            late = ConfigError(f"{name} gave no keys within {deadline_s:g} s")
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


def forms_of(config: Config, keys: KeySource | None) -> Mapping[str, StoredForm]:
    """The form of each tier, by name.

    Raises:
        ConfigError: the package of a codec is missing.
    """
    forms: dict[str, StoredForm] = {}
    for tier in config.tiers:
        codec = by_name(tier.codec or config.store.codec)
        choice = None if codec.id == RAW.id else CodecChoice(codec, tier.read_threads, tier.write_threads)
        forms[tier.name] = StoredForm(codec, keys, config.store.tenant, is_sealed=is_sealed(tier), choice=choice)
    if locked := ", ".join(name for name, form in forms.items() if form.is_locked):
        logger.warning(
            "%s has no key that seals: nothing is found or stored while that is so (tiers that seal: %s)",
            f"tenant {config.store.tenant!r}" if config.store.tenant else "the engine, which has no tenant,",
            locked,
        )
    return forms


def locked_by(config: Config, keys: KeySource | None) -> str:
    """What is missing if a tier demands seals and the tenant has no key that seals; else empty."""
    has_key = keys is not None and keys.keyring.sealing(config.store.tenant) is not None
    is_locked = not has_key and any(map(is_sealed, config.tiers))
    return "the tenant has no key (store.keys_file, store.tenant)" if is_locked else ""


def closing_keys(close: Callable[[float], None], keys: KeySource | None) -> Callable[[float], None]:
    """`close`, which also ends the reading of keys."""

    def both(deadline_s: float) -> None:
        if keys is not None:
            keys.close()
        close(deadline_s)

    return both
