"""Where kvtier's log lines go in vLLM's processes: where vLLM's own lines go.

vLLM configures the logger ``vllm`` alone. Without this a line of kvtier at INFO is lost. A warning
reaches Python's last resort, which shows neither time nor name.
"""

import logging
from pathlib import PurePath

import kvtier

ENGINE_LEVEL = "engine"
"""The setting `log.level` that takes vLLM's own level."""

_PACKAGE = PurePath(kvtier.__file__).parent.parent


def follow_engine(level: str = ENGINE_LEVEL) -> None:
    """Hand kvtier's lines to vLLM's handlers. A second call changes the level only.

    `VLLM_CONFIGURE_LOGGING`, `VLLM_LOGGING_LEVEL` and the user's own configuration of ``vllm`` or the root are so
    followed as well. A user who gives ``kvtier`` handlers of its own keeps them.

    Args:
        level: the setting `log.level`.
    """
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if level != ENGINE_LEVEL:
        ours.setLevel(level.upper())
    followers = [handler for handler in ours.handlers if isinstance(handler, _Follower)]
    if not ours.handlers:
        followers = [_Follower(theirs)]
        ours.parent = theirs  # the level, where ours has none
        ours.propagate = False
        ours.addHandler(followers[0])
    for follower in followers:
        follower.has_own_level = level != ENGINE_LEVEL


class _Follower(logging.Handler):
    """Passes a record to the handlers that a record of `engine` would reach.

    Args:
        engine: vLLM's logger.
    """

    def __init__(self, engine: logging.Logger) -> None:
        super().__init__()
        self._engine = engine
        self.has_own_level = False
        """vLLM's handlers have its level, too, and would drop what is below it."""

    def handle(self, record: logging.LogRecord) -> bool:
        """Pass `record` on, under no lock of our own. vLLM shows the name of its file, which is then ours."""
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
