"""Sends kvtier's log records to vLLM's log handlers.

vLLM configures only the logger ``vllm``. By default Python would drop kvtier's INFO records and print warnings without
time or name.
"""

import logging

ENGINE_LEVEL = "engine"
"""Value of the setting `log.level` that makes kvtier follow vLLM's level."""


def follow_engine(level: str = ENGINE_LEVEL) -> None:
    """Pass kvtier's records to vLLM's handlers. A second call changes only the level.

    So `VLLM_CONFIGURE_LOGGING`, `VLLM_LOGGING_LEVEL` and a user's configuration of ``vllm`` or the root logger apply
    to kvtier, too. Handlers that a user has set on ``kvtier`` stay.

    Args:
        level: the setting `log.level`.
    """
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if level != ENGINE_LEVEL:
        ours.setLevel(level.upper())
    if not ours.handlers:
        ours.parent = theirs
        if level != ENGINE_LEVEL and theirs.handlers:
            ours.propagate = False
            ours.addHandler(_AnyLevel(theirs))


class _AnyLevel(logging.Handler):
    """Passes records to the handlers of the logger `engine`, whatever the level of that logger.

    Args:
        engine: vLLM's logger.
    """

    def __init__(self, engine: logging.Logger) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        """Pass `record` to the engine's handlers."""
        for handler in self._engine.handlers:
            handler.handle(record)
