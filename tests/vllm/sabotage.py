"""What is broken on purpose in an engine's process before it starts. Each function is named by a test.

`FLAG` is a file: what hangs, hangs until it is gone.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

FLAG = "SABOTAGE_FLAG"
IN_WORKERS = "SABOTAGE_IN_WORKERS"
"""A variable: the function that is called in each worker which imports this module (`InWorkers`)."""
HANG_S = 60.0
SLOW_S = 0.05
LATE_S = 0.6
"""Many steps of the engine, on a fast machine and on a slow one."""


class InWorkers:
    """Adds nothing to vLLM's worker. With `worker_extension_cls` each worker imports this module for it."""


def lose_unpin_blocks() -> None:
    """Another release of vLLM, in which the block pool has another interface."""
    from vllm.v1.core.block_pool import BlockPool

    del BlockPool.unpin_blocks


def hang_reads() -> None:
    """A device that does not answer: every read of the directory waits."""
    _hang("read_many")


def hang_probes() -> None:
    """Every question whether an object is there waits."""
    _hang("contains")


def hang_writes() -> None:
    """Every write to the directory waits."""
    _hang("write_many")


def code_all() -> None:
    """Every object is coded, as on a slow link."""
    from kvtier.runtime.adaptive_coding import CodecChoice

    CodecChoice.codes = lambda self, *_: True  # type: ignore[method-assign]


def declare_axes() -> None:
    """A CPU's packed pages count as rows of keys, so that such an engine can have a lossy class.

    The numbers of a group then have little in common, so more is lost than with an arrangement that is right.
    """
    from kvtier.layout import ELEMENT_BYTES, Axes, GroupLayout

    inner = GroupLayout.of_class

    def of_class(self: GroupLayout, loss: Any) -> GroupLayout:
        element = "fp32"
        runs = tuple(tuple(it._replace(kind="keys", element=element) for it in layer) for layer in self.runs)
        row = self.chunk_tokens * ELEMENT_BYTES[element]
        axes = tuple(
            tuple(Axes(("token", "channel"), (self.chunk_tokens, it.size_bytes // row)) for it in layer)
            for layer in self.runs
        )
        return inner(replace(self, runs=runs, axes=axes) if loss != "none" else self, loss)

    GroupLayout.of_class = of_class  # type: ignore[method-assign]


def slow_copies(slow_s: float = SLOW_S) -> None:
    """Copies between the engine's blocks and host memory begin `slow_s` late, when the engine may be steps ahead."""
    from kvtier.connect.vllm.worker.cpu_copy import CpuPageCopy

    def late(inner: Callable[..., Any]) -> Callable[..., Any]:
        def copy(self: CpuPageCopy, *arguments: Any) -> Any:
            time.sleep(slow_s)
            return inner(self, *arguments)

        return copy

    CpuPageCopy.gather = late(CpuPageCopy.gather)  # type: ignore[method-assign]
    CpuPageCopy.scatter = late(CpuPageCopy.scatter)  # type: ignore[method-assign]


def late_copies() -> None:
    """Copies begin so late that computing is faster, even on a busy machine."""
    slow_copies(LATE_S)


def hold_scatters() -> None:
    """Copies to the blocks of the second worker hang. Its process is in a file beside the flag."""
    from vllm.distributed.parallel_state import get_tp_group

    from kvtier.connect.vllm.worker.cpu_copy import CpuPageCopy

    inner = CpuPageCopy.scatter

    def scatter(self: CpuPageCopy, *arguments: Any) -> Any:
        flag = Path(os.environ[FLAG])
        if flag.exists() and get_tp_group().rank_in_group == 1:
            flag.with_suffix(".held").write_text(str(os.getpid()))
            while flag.exists():
                time.sleep(0.01)
        return inner(self, *arguments)

    CpuPageCopy.scatter = scatter  # type: ignore[method-assign]


def unfenced_copies() -> None:
    """Later still, and without revocation: the control of the fence tests."""
    from kvtier.connect.vllm.worker.copier import BlockCopier

    slow_copies(LATE_S)
    BlockCopier.revoke = lambda self, requests, wait_s: True  # type: ignore[method-assign]


def trust_launched_steps() -> None:
    """A step counts as computed when it is launched."""
    from kvtier.connect.vllm.requests.tracked import TrackedRequest

    def computed_tokens(self: TrackedRequest, confirmed_step: int) -> int:
        return 0 if self.began_step is None else min(self.request.num_computed_tokens, self.request.num_tokens)

    TrackedRequest.computed_tokens = computed_tokens  # type: ignore[method-assign]


def confirm_early() -> None:
    """The workers report the step after the one that has returned."""
    from kvtier.connect.vllm.worker.worker_step import Worker

    inner = Worker.done
    Worker.done = property(lambda self: replace(found := inner.__get__(self), step=found.step + 1))  # type: ignore[assignment, method-assign]


def watch_no_reuse() -> None:
    """Stores are late, and nobody looks whether vLLM hands out a block that one reads."""
    from kvtier.connect.vllm.scheduler.block_pool import BlockPins
    from kvtier.connect.vllm.worker.cpu_copy import CpuPageCopy

    inner = CpuPageCopy.gather

    def gather(self: CpuPageCopy, group: int, ids: Any, payload: memoryview) -> None:
        time.sleep(LATE_S / 3)
        inner(self, group, ids, payload)

    CpuPageCopy.gather = gather  # type: ignore[method-assign]
    BlockPins._reused = lambda self, block: None  # type: ignore[method-assign]


def free_at_once() -> None:
    """vLLM hands out blocks that a step under way writes, as it does without a connector that loads."""
    from vllm.v1.core.sched.scheduler import Scheduler

    Scheduler._request_blocks_can_be_freed = lambda self, request: True  # type: ignore[method-assign]


def load_late() -> None:
    """A load is reported before its bytes are there."""
    from kvtier.connect.vllm.worker.cpu_copy import CpuPageCopy

    inner = CpuPageCopy.scatter

    def scatter(self: CpuPageCopy, group: int, ids: Any, payload: memoryview) -> None:
        threading.Timer(SLOW_S, inner, (self, group, ids, memoryview(bytes(payload)))).start()

    CpuPageCopy.scatter = scatter  # type: ignore[method-assign]


def fail_lookups() -> None:
    """A bug in kvtier where a request is looked up."""
    from kvtier.connect.vllm.scheduler.scheduler import Scheduler

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


CHANGE = "SABOTAGE_CHANGE"
"""When, how, and in which file: see `change_checkpoint`."""


def changing(file: Path, when: str, how: str) -> dict[str, Any]:
    """Fields of an engine that starts while `file` becomes another one: half of its bytes are zero."""
    content = file.read_bytes()
    file.with_name(f"{file.name}.other").write_bytes(content[: len(content) // 2] + bytes(-(-len(content) // 2)))
    environment = {CHANGE: f"{when}:{how}:{file}"}
    return {"sabotage": "sabotage:change_checkpoint", "environment": environment}


def change_checkpoint() -> None:
    """A file of a checkpoint changes while the engine starts.

    It changes when vLLM has loaded the weights of its folder (``loaded``), or it comes only with the download that the
    loader makes (``download``).
    """
    from vllm.model_executor.model_loader import DefaultModelLoader

    when, how, place = os.environ[CHANGE].split(":")
    file = Path(place)
    load, prepare = DefaultModelLoader.load_weights, DefaultModelLoader._prepare_weights

    def load_weights(self: Any, model: Any, model_config: Any) -> Any:
        done = load(self, model, model_config)
        if when == "loaded" and str(file.parent) == model_config.model:
            _changes(how, file)
        return done

    def _prepare_weights(self: Any, *arguments: Any) -> Any:
        if when == "download":
            _changes(how, file)
        return prepare(self, *arguments)

    DefaultModelLoader.load_weights = load_weights  # type: ignore[method-assign]
    DefaultModelLoader._prepare_weights = _prepare_weights  # type: ignore[method-assign]


def _changes(how: str, file: Path) -> None:
    """The bytes of another file, beside this one, come into its place.

    Args:
        how: ``replace``, as rsync and downloads do it; ``rewrite`` in place, with the old time; or ``link``, which
            points the file, a link, to the other one.
        file: the file.
    """
    other = file.with_name(f"{file.name}.other")
    if how == "rewrite":
        about = file.stat()
        file.write_bytes(other.read_bytes())
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    elif how == "link":
        file.unlink()
        file.symlink_to(other.name)
    else:
        other.replace(file)


if IN_WORKERS in os.environ:
    globals()[os.environ[IN_WORKERS]]()
