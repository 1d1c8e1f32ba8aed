"""Copies on a simulated device: for every seed every byte is right and nothing races. Planted bugs are found.

`tests/device_copies` says what a schedule is. A mutant is found by PyTorch's race checker, by wrong bytes, or by a
host that waits for the engine's stream. Each names what must see it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests import simulated_cuda  # noqa: E402 - after the check
from tests.device_copies import run_held, run_transformers, run_vllm  # noqa: E402
from tests.simulated_cuda import cuda  # noqa: E402

from kvtier.connect.transformers import copier as cache_copier  # noqa: E402
from kvtier.connect.vllm.worker import copier as block_copier  # noqa: E402
from kvtier.connect.vllm.worker import cuda_copy  # noqa: E402
from kvtier.runtime.command_runner import CommandRunner  # noqa: E402

Patch = pytest.MonkeyPatch
Run = Callable[[int], list[str]]

SEEDS = 50
"""Each planted bug below is seen within as many, too. Nightly runs more."""
NIGHTLY_SEEDS = 3000
MUTANT_SEEDS = 200
"""A mutant that survives as many seeds breaks something that nothing checks."""

RACE, BYTES, STALL = "without an order", "wrong bytes", "a stream that is held"
MUTANTS: list[tuple[Callable[[Patch], None], Run, tuple[str, ...]]] = []


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with simulated_cuda.installed():
        yield


@pytest.mark.parametrize("run", [run_vllm, run_transformers, run_held])
def test_every_byte_is_right_in_any_order(run: Run) -> None:
    for seed in range(SEEDS):
        assert not run(seed), f"seed {seed}"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run", [run_vllm, run_transformers, run_held])
def test_every_byte_is_right_in_thousands_of_orders(run: Run) -> None:
    for seed in range(SEEDS, NIGHTLY_SEEDS):
        assert not run(seed), f"seed {seed}"


# ---- planted bugs ------------------------------------------------------------------------------------------------


def mutant(run: Run, *seen: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append((plant, run, seen))
        return plant

    return register


@mutant(run_vllm, RACE, BYTES)
def copies_do_not_wait_for_a_draft_model(patch: Patch) -> None:
    patch.setattr(cuda_copy.CudaPageCopy, "note_step", lambda self: None)


@mutant(run_vllm, RACE, BYTES)
def a_step_is_noted_late(patch: Patch) -> None:
    real = cuda_copy.CudaPageCopy.note_step

    def note_step(self: Any) -> None:
        last, self._step = self._step, None
        real(self)
        self._next, self._step = self._step, getattr(self, "_next", last)

    patch.setattr(cuda_copy.CudaPageCopy, "note_step", note_step)


@mutant(run_transformers, RACE, BYTES)
def copies_do_not_wait_for_what_the_engine_had_queued(patch: Patch) -> None:
    patch.setattr(cuda.Stream, "wait_event", lambda self, event: None)


@mutant(run_vllm, RACE, BYTES)
def a_fence_stands_before_the_copies(patch: Patch) -> None:
    real, early = cuda_copy.CudaPageCopy._on_stream, threading.local()

    @contextmanager
    def on_stream(self: Any) -> Iterator[Any]:
        with real(self) as stream:
            early.event = stream.record_event()
            yield stream

    patch.setattr(cuda_copy.CudaPageCopy, "_on_stream", on_stream)
    patch.setattr(cuda_copy.CudaFence, "__init__", lambda self, _event: setattr(self, "event", early.event))


@mutant(run_transformers, RACE, BYTES)
def a_fence_of_a_row_stands_before_its_last_copy(patch: Patch) -> None:
    real = cache_copier._move
    early: dict[Any, Any] = {}

    def move(layer: Any, *args: Any, **kwargs: Any) -> None:
        stream = torch.cuda.current_stream()
        early[stream] = stream.record_event()
        real(layer, *args, **kwargs)

    patch.setattr(cache_copier, "_move", move)

    def init(self: Any, _events: Any, row: Any) -> None:
        self.events, self.row = [early[torch.cuda.current_stream()]], row

    patch.setattr(cache_copier.StreamFence, "__init__", init)


@mutant(run_vllm, RACE, BYTES)
def threads_share_a_buffer(patch: Patch) -> None:
    shared: dict[str, Any] = {}
    real = cuda_copy.CudaPageCopy.__init__

    def init(self: Any, pages: Any) -> None:
        shared.clear()
        real(self, pages)

    patch.setattr(cuda_copy.CudaPageCopy, "__init__", init)
    buffer = property(lambda self: shared.get("it"), lambda self, value: shared.update(it=value))
    patch.setattr(cuda_copy._ThreadState, "buffer", buffer)


@mutant(run_vllm, RACE)
def a_buffer_is_allocated_on_the_engines_stream(patch: Patch) -> None:
    real = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return real(*args, **kwargs)

    patch.setattr(torch, "empty", empty)


@mutant(run_vllm, RACE)
def an_index_is_freed_on_another_stream(patch: Patch) -> None:
    real = cuda_copy.CudaPageCopy._index

    def index(self: Any, numbers: Any) -> Any:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return real(self, numbers)

    patch.setattr(cuda_copy.CudaPageCopy, "_index", index)


@mutant(run_held, STALL)
def copies_run_on_the_engines_stream(patch: Patch) -> None:
    patch.setattr(cuda_copy._ThreadState, "stream", property(lambda self: torch.cuda.default_stream()))


@mutant(run_held, STALL)
def copies_of_rows_run_on_the_engines_stream(patch: Patch) -> None:
    real = cache_copier.CacheCopier.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        for streams in (self._gather_streams, self._scatter_streams):
            streams.update(dict.fromkeys(streams, torch.cuda.default_stream()))

    patch.setattr(cache_copier.CacheCopier, "__init__", init)


@mutant(run_vllm, RACE, BYTES)
@mutant(run_transformers, RACE, BYTES)
def a_slot_is_released_at_submit(patch: Patch) -> None:
    patch.setattr(CommandRunner, "_await", lambda self, fence, transfer: None)


@mutant(run_vllm, RACE)
@mutant(run_transformers, RACE)
def an_error_is_reported_while_copies_run(patch: Patch) -> None:
    patch.setattr(cuda.Stream, "synchronize", lambda self: None)


@mutant(run_vllm, RACE, BYTES)
def a_running_scatter_is_not_waited_for(patch: Patch) -> None:
    patch.setattr(block_copier.BlockCopier, "_writes", lambda self, copy: False)


@mutant(run_vllm, BYTES)
def a_revoked_store_counts(patch: Patch) -> None:
    patch.setattr(block_copier.BlockCopier, "_refuse_revoked", lambda self, running: None)


@mutant(run_transformers, RACE, BYTES)
def tensors_are_freed_under_a_copy(patch: Patch) -> None:
    patch.setattr(cache_copier.StreamFence, "__init__", lambda self, events, _row: setattr(self, "events", events))


@pytest.mark.parametrize(("plant", "run", "seen"), MUTANTS, ids=lambda it: getattr(it, "__name__", ""))
def test_a_mutant_is_found(plant: Callable[[Patch], None], run: Run, seen: tuple[str, ...], monkeypatch: Patch) -> None:
    """By all that must see it; a crash of the patch does not count."""
    plant(monkeypatch)
    began_s = time.process_time()
    missing = set(seen)
    for seed in range(MUTANT_SEEDS):
        problems = run(seed)
        for kind in [kind for kind in missing if any(kind in problem for problem in problems)]:
            missing.remove(kind)
            print(f"{plant.__name__}: {kind}: seed {seed}, {time.process_time() - began_s:.1f} s")
        if not missing:
            return
    pytest.fail(f"{plant.__name__} survived {MUTANT_SEEDS} seeds, not seen as {missing}")
