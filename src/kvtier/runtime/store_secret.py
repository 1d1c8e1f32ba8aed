"""Finds the secret that keys a session's names, in the settings or in a tier's store."""

import logging
import os
import secrets
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvtier.config.sections import HOW_TO_SHARE, Config
from kvtier.errors import ConfigError, DamagedStoreError, TierError, described
from kvtier.keys.secret import SECRET_BYTES, Secret, load, load_or_create
from kvtier.runtime.deferred_tier import insisting
from kvtier.tier.files.safe_open import UnusableStoreError, refuse_public
from kvtier.tier.files.store_root import MISTAKES, command
from kvtier.tier.registry import TierSettings, kind_of

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

SECRET_GRACE_S = 0.5
"""How long to wait for the secret of a tier that did not open. The time is short, because a tier that hangs has already
used up its deadline. A tier that is locked by another process or reads a large index still has a readable secret."""


def configured_secret(config: Config) -> Secret | None:
    """Return the secret in the settings, or None if there is none.

    Raises:
        ConfigError: the file cannot be read in time, contains no secret, or is missing although a tier is shared.
    """
    deadline_s, file = config.limits.open_deadline_s, config.store.secret_file
    about = {"setting": "store.secret_file", "value": repr(str(file))}
    if config.store.secret is not None or file is None:
        return config.store.secret
    is_shared = any(kind_of(tier).is_shared(tier) for tier in config.tiers)
    try:
        found = within(deadline_s, partial(load if is_shared else load_or_create, file), "kvtier secret")
    except TimeoutError:
        raise ConfigError(f"could not be read within {deadline_s:g} s", **about) from None
    if found is None:
        raise ConfigError(f"does not exist, and a shared tier needs it; {HOW_TO_SHARE}", **about)
    return found


def found_secret(config: Config) -> tuple[Secret | None, str]:
    """Return the configured secret or None, and the reason if its file provides none (else ``""``).

    A start calls this once.
    """
    try:
        return configured_secret(config), ""
    except (ConfigError, OSError) as error:
        return None, described(error)


def store_secret(config: Config, down: Collection[str], given: Secret | None, flaw: str) -> Secret:
    """Return the configured secret, the secret of the first tier that can hold one, or a temporary one.

    Args:
        config: the settings.
        down: names of the tiers that are not open.
        given: the configured secret, from `found_secret`.
        flaw: why the file of the configured secret provides none, from `found_secret`. The secret is then temporary,
            and the caller must not let any tier use it.

    Raises:
        TierError: the tier that holds the secret is required and failed, or there is a flaw and a tier is required.
    """
    if given is not None:
        return given
    if flaw:
        for tier in config.tiers:
            if tier.required:
                raise insisting(tier.name, DamagedStoreError(tier.name, flaw))
        logger.error("%s; no tier is used until kvtier is restarted", flaw)
        return Secret(secrets.token_bytes(SECRET_BYTES))
    deadline_s = config.limits.open_deadline_s
    for tier in config.tiers:
        path = kind_of(tier).secret_path(tier)
        if path is None:
            continue
        wait_s = min(deadline_s, SECRET_GRACE_S) if tier.name in down else deadline_s
        try:
            return within(wait_s, partial(_stored_secret, tier, path, is_down=tier.name in down), "kvtier secret")
        except Exception as caught:  # noqa: BLE001 - a kind of another package must not end the engine
            late = TierError(tier.name, f"the secret in it could not be read within {wait_s:g} s")
            error = late if isinstance(caught, TimeoutError) else caught
            if tier.required:
                raise insisting(tier.name, error) from error
            is_damaged = not _may_pass(error)
            logger.log(
                logging.ERROR if is_damaged else logging.WARNING,
                "%s; kvtier uses a temporary secret: no other process, now or later, finds the objects of this one%s",
                error,
                f"; restore it, or repair the store: {command('repair', path.parent)}" if is_damaged else "",
            )
            break
    else:
        if any(kind_of(tier).persists for tier in config.tiers):
            logger.warning(
                "no secret is configured, and no tier has a place for one: no other process, now or later, finds the "
                "objects of this one; set store.secret_file"
            )
    return Secret(secrets.token_bytes(SECRET_BYTES))  # no tier outlives the process, so the names need not either


def _stored_secret(tier: TierSettings, path: Path, *, is_down: bool) -> Secret:
    """Return the secret in a store's directory. A tier that is down gets a new one only if it can open later.

    Raises:
        ConfigError: the file is damaged, or the directory cannot be used.
        OSError: the directory cannot be read.
    """
    any_owner = getattr(tier, "any_owner", None)  # kinds of other packages lack it
    with suppress(FileNotFoundError):
        refuse_public(path.parent, any_owner=bool(any_owner))
    if is_down and not os.path.lexists(path):
        for problem in kind_of(tier).check(tier):
            if problem.level == "error":
                raise UnusableStoreError(problem.detail)
    return load_or_create(path, is_inside=True, any_owner=any_owner)


def within(deadline_s: float, act: Callable[[], Answer], thread: str) -> Answer:
    """Return the result of `act`, which runs in a thread named `thread` because a file system may hang.

    Raises:
        TimeoutError: `act` takes longer than `deadline_s` seconds. Its exceptions are also raised.
    """
    result: Future[Answer] = Future()

    def run() -> None:
        try:
            result.set_result(act())
        except Exception as error:  # noqa: BLE001 - the caller raises it
            result.set_exception(error)

    threading.Thread(target=run, name=thread, daemon=True).start()
    return result.result(deadline_s)


def _may_pass(error: Exception) -> bool:
    """Return whether the directory or the storage has failed, which opening the tier also reports.

    False means that the file itself is invalid.
    """
    if not isinstance(error, ConfigError) or isinstance(error, UnusableStoreError):
        return True
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in MISTAKES
