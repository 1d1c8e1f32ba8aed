"""Page-locks host memory for copies to and from a CUDA device. Imports torch."""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch

from kvtier.errors import ConfigError

logger = logging.getLogger(__name__)


def cuda_page_lock(mode: str) -> Callable[[int, int], Callable[[], None]] | None:
    """What page-locks memory, as an arena wants it; None where `mode` is ``off``.

    Args:
        mode: the setting `host.page_lock`. With ``auto`` memory that cannot be locked is used as it is.

    Raises (from what is returned):
        ConfigError: the mode is ``on`` and the memory cannot be locked.
    """
    if mode == "off":
        return None

    def lock(address: int, size_bytes: int) -> Callable[[], None]:
        runtime = cast("Any", torch.cuda.cudart())
        code = int(runtime.cudaHostRegister(address, size_bytes, 0))
        if code == 0:
            return lambda: runtime.cudaHostUnregister(address)
        if mode == "on":
            raise ConfigError(
                f"host.page_lock = on, but {size_bytes} bytes cannot be page-locked (CUDA error {code}); "
                "allowed: a smaller host.capacity_bytes, or auto"
            )
        logger.warning("%d bytes of host memory cannot be page-locked (CUDA error %d)", size_bytes, code)
        return lambda: None

    return lock
