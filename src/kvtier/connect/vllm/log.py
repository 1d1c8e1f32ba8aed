"""Sends kvtier's log records to vLLM's log handlers.

vLLM configures only the logger ``vllm``. By default Python would drop kvtier's INFO records, and print warnings without
time or name.
"""

import logging
from pathlib import PurePath

import kvtier

ENGINE_LEVEL = "engine"
"""Value of the setting `log.level` that follows vLLM's level."""

_PACKAGE = PurePath(kvtier.__file__).parent.parent


def follow_engine(level: str = ENGINE_LEVEL) -> None:
    """Pass kvtier's records to vLLM's handlers. A second call changes the level only.

    So `VLLM_CONFIGURE_LOGGING`, `VLLM_LOGGING_LEVEL` and a user's configuration of ``vllm`` or the root logger apply to
    kvtier, too. Handlers that a user has set on ``kvtier`` stay.

    Args:
        level: the setting `log.level`.
    """
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if level != ENGINE_LEVEL:
        ours.setLevel(level.upper())
    followers = [handler for handler in ours.handlers if isinstance(handler, _Follower)]
    if not ours.handlers:
        followers = [_Follower(theirs)]
        ours.parent = theirs  # inherit its level
        ours.propagate = False
        ours.addHandler(followers[0])
    for follower in followers:
        follower.has_own_level = level != ENGINE_LEVEL


class _Follower(logging.Handler):
    """Passes a record to the handlers of the logger `engine`.

    Args:
        engine: vLLM's logger.
    """

    def __init__(self, engine: logging.Logger) -> None:
        super().__init__()
        self._engine = engine
        self.has_own_level = False
        """Whether `log.level` is set. Handlers of vLLM filter by its own level, so they are called directly."""

    def handle(self, record: logging.LogRecord) -> bool:
        """Pass `record` on, without a lock, and with its file name relative to the package."""
        path = PurePath(record.pathname)
        if path.is_relative_to(_PACKAGE):
            record.filename = path.relative_to(_PACKAGE).as_posix()
        if not self.has_own_level:
            self._engine.callHandlers(record)
            return True
        logger: logging.Logger | None = self._engine
        handlers: list[logging.Handler] = []
        while logger is not None:
            handlers += logger.handlers
            logger = logger.parent if logger.propagate else None
        for handler in handlers or [logging.lastResort]:
            if handler is not None:
                handler.handle(record)
        return True
