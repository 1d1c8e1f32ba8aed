"""What is broken on purpose in an engine's process before it starts. Each function is named by a test.

`FLAG` is a file: what hangs, hangs until it is gone.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLAG = "SABOTAGE_FLAG"
HANG_S = 60.0
SLOW_S = 0.05
LATE_S = 0.6
"""Many steps of the engine, on a fast machine and on a slow one."""


def hang_reads() -> None:
    """A device that does not answer: every read of the directory waits."""
    _hang("read_one")


def hang_probes() -> None:
    """Every question whether an object is there waits."""
    _hang("contains")


def hang_writes() -> None:
    """Every write to the directory waits."""
    _hang("write_one")


def code_all() -> None:
    """Every object is coded, as on a slow link."""
    from kvtier.runtime.codec_choice import CodecChoice

    CodecChoice.codes = lambda self, *_: True  # type: ignore[method-assign]


def slow_copies(slow_s: float = SLOW_S) -> None:
    """Copies between the engine's blocks and host memory begin `slow_s` late, when the engine may be steps ahead."""
    from kvtier.connect.vllm.cpu_copy import CpuPageCopy

    def late(inner: Callable[..., Any]) -> Callable[..., Any]:
        def copy(self: CpuPageCopy, *arguments: Any) -> Any:
            time.sleep(slow_s)
            return inner(self, *arguments)

        return copy

    CpuPageCopy.gather = late(CpuPageCopy.gather)  # type: ignore[method-assign]
    CpuPageCopy.scatter = late(CpuPageCopy.scatter)  # type: ignore[method-assign]


def unfenced_copies() -> None:
    """Later still, and without revocation: the control of the fence tests."""
    from kvtier.connect.vllm.copier import BlockCopier

    slow_copies(LATE_S)
    BlockCopier.revoke = lambda self, requests, wait_s: True  # type: ignore[method-assign]


def fail_lookups() -> None:
    """A bug in kvtier where a request is looked up."""
    from kvtier.connect.vllm.scheduler import Scheduler

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("a mistake of ours")

    Scheduler.matched = fail  # type: ignore[method-assign]


def _hang(method: str) -> None:
    from kvtier.errors import TierError
    from kvtier.tier.directory.tier import DirectoryTier

    inner = getattr(DirectoryTier, method)

    def wait(self: DirectoryTier, *arguments: Any) -> Any:
        flag = Path(os.environ[FLAG])
        until_s = time.monotonic() + HANG_S
        while flag.exists():
            if time.monotonic() > until_s:
                raise TierError(self.name, "hung until the test's own deadline")
            time.sleep(0.01)
        return inner(self, *arguments)

    setattr(DirectoryTier, method, wait)
