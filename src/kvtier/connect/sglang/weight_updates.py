"""Detects changes of weights while the engine runs. SGLang replaces weights without notifying a storage backend.

KV of the new weights must not be stored under the digest of the old ones. So kvtier wraps SGLang's methods that
replace weights in place. From the first of these calls on, kvtier stores and finds nothing until the engine is
restarted.
"""

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

from kvtier.errors import ConfigError

UPDATER = ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater")
"""The class through which SGLang replaces weights at run time."""

UPDATES = (
    "update_weights_from_disk", "receive_weights_from_distributed", "begin_weight_update",
    "load_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc",
)  # fmt: skip
"""The methods of `UPDATER` that change weights."""

_SEEN = "_kvtier_has_changed_weights"
_watchers: list[Callable[[], None]] = []


def watch_weights(changed: Callable[[], None]) -> None:
    """Call `changed` before this process's weights change. SGLang itself does not notify storage backends.

    Raises:
        ConfigError: the weights have already changed, so the checkpoint no longer identifies them; or SGLang lacks a
            method.
    """
    if getattr(install(), _SEEN):
        raise ConfigError("the engine's weights were replaced while it ran, so its KV cannot be identified; restart it")
    _watchers.append(changed)


def install() -> Any:  # noqa: ANN401 - SGLang's class
    """Detect changes of this process's weights from now on. Return SGLang's class that makes them.

    Raises:
        ConfigError: SGLang lacks a method.
    """
    try:
        module = importlib.import_module(UPDATER[0])
    except (ImportError, OSError) as error:
        raise ConfigError(f"SGLang's module {UPDATER[0]} cannot be imported: {error}") from error
    updater: Any = getattr(module, UPDATER[1], None)
    lacking = [name for name in UPDATES if not hasattr(updater, name)]
    if lacking:
        raise ConfigError(f"SGLang's {UPDATER[1]} lacks {', '.join(lacking)}, so changes of weights would go unnoticed")
    if getattr(updater, _SEEN, None) is None:
        setattr(updater, _SEEN, False)
        for name in UPDATES:
            setattr(updater, name, _announced(updater, getattr(updater, name)))
    return updater


def forget(changed: Callable[[], None]) -> None:
    """Undo `watch_weights`."""
    if changed in _watchers:
        _watchers.remove(changed)


def _announced(updater: object, method: Callable[..., object]) -> Callable[..., object]:
    @wraps(method)
    def run(*args: object, **kwargs: object) -> object:
        setattr(updater, _SEEN, True)
        for changed in tuple(_watchers):
            changed()
        return method(*args, **kwargs)

    return run
