"""The simulated device has the hazards of a real one: each is shown by what happens without the care it needs."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.waiting import wait_until

torch: Any = pytest.importorskip("torch")

from tests.simulated_cuda import Machine, begin, installed  # noqa: E402 - after the check
from tests.simulated_cuda.machine import DeviceError  # noqa: E402
from tests.simulated_cuda.turns import StalledError  # noqa: E402

from kvtier.device.page_lock import cuda_page_lock  # noqa: E402
from kvtier.runtime.arena import page_aligned  # noqa: E402

SEEDS = range(40)
COUNT = 512


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    """It leaves no trace."""
    before = dict(vars(torch.cuda)), torch.tensor, torch.Tensor.to
    with installed():
        yield
    after = {name: vars(torch.cuda)[name] for name in before[0]}, torch.tensor, torch.Tensor.to
    changed = {name for name, it in before[0].items() if after[0][name] is not it}
    assert not changed
    assert after[1:] == before[1:]
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        torch.empty(1, device="cuda")


def lazy(seed: int = 0) -> Machine:
    """A device that runs nothing before the host waits."""
    machine = begin(seed)
    machine.eagerness = 0.0
    machine.rng.random = lambda: 0.5
    return machine


def host_memory(machine: Machine, *, is_locked: bool = True) -> Any:
    """uint8 of the host, 0."""
    memory = page_aligned(COUNT)
    memory[:] = 0
    if is_locked:
        assert machine.register(int(memory.ctypes.data), memory.nbytes) == 0
    return torch.from_numpy(memory)


def sevens() -> Any:
    return torch.full((COUNT,), 7, dtype=torch.uint8, device="cuda")


def values(tensor: Any) -> set[int]:
    return set(tensor.numpy().tolist())


# ---- order -------------------------------------------------------------------------------------------------------


def test_nothing_runs_before_someone_waits_and_unwritten_memory_is_poison():
    machine = lazy()
    written = sevens()
    assert values(written.near) == {0xDB}
    torch.cuda.synchronize()
    assert values(written.near) == {7}
    assert not machine.races


@pytest.mark.parametrize("waits", [True, False])
def test_another_stream_reads_too_early_unless_it_waits(waits):
    seen, races = set(), 0
    for seed in SEEDS:
        machine = begin(seed)
        held = host_memory(machine)
        other = torch.cuda.Stream()
        written = sevens()
        if waits:
            other.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(other):
            held.copy_(written, non_blocking=True)
        other.synchronize()
        seen |= values(held)
        races += bool(machine.races)
    assert (seen, races) == (({7}, 0) if waits else ({7, 0xDB}, len(SEEDS)))


def test_a_seed_decides_everything():
    def trace(seed: int) -> list[int]:
        begin(seed)
        order: list[int] = []
        machine = begin(seed)
        for number in range(4):
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(4):
                    machine.launch("note", lambda it=number * 4 + step: order.append(it))
        torch.cuda.synchronize()
        for number in range(4):
            assert [it for it in order if it // 4 == number] == list(range(number * 4, number * 4 + 4))
        return order

    assert trace(1) == trace(1)
    assert len({tuple(trace(seed)) for seed in range(10)}) > 5


def test_an_event_stands_behind_what_was_queued_before_it_only():
    machine = lazy()
    held = host_memory(machine)
    written = sevens()
    early = torch.cuda.current_stream().record_event()
    held.copy_(written, non_blocking=True)
    early.synchronize()
    assert values(written.near) == {7}
    assert values(held) == {0}, "the copy is behind the event"
    machine.host_reads("a read", held.numpy())
    assert len(machine.races) == 1


def test_a_poll_ends():
    for seed in SEEDS:
        begin(seed)
        sevens()
        torch.cuda._sleep(1)
        event = torch.cuda.current_stream().record_event()
        assert any(event.query() for _ in range(100))


def test_a_host_that_waits_for_a_held_stream_is_reported(monkeypatch):
    monkeypatch.setattr("tests.simulated_cuda.machine.STALLED_S", 0.0)
    machine = begin()
    with machine.held():
        with torch.cuda.stream(torch.cuda.Stream()):
            sevens().cpu()
        with pytest.raises(StalledError):
            sevens().cpu()
    torch.cuda.synchronize()


def test_more_streams_than_the_pool_has_share_them():
    begin(stream_count=2)
    first, second, third = (torch.cuda.Stream() for _ in range(3))
    assert first == third != second


# ---- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_recorded", [True, False])
def test_freed_memory_is_reused_on_its_stream_whoever_reads_it(is_recorded):
    seen, races = set(), 0
    for seed in SEEDS:
        machine = begin(seed)
        held = host_memory(machine)
        other = torch.cuda.Stream()
        written = sevens()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            held.copy_(written, non_blocking=True)
        if is_recorded:
            written.record_stream(other)
        del written
        torch.cuda.synchronize()
        seen |= values(held)
        races += bool(machine.races)
    assert (seen, races) == (({7}, 0) if is_recorded else ({7, 0xDB}, len(SEEDS)))


def test_memory_lives_as_long_as_a_view_of_it():
    machine = lazy()
    view = sevens()[3:5]
    torch.cuda.synchronize()
    assert view.tolist() == [7, 7]
    assert not machine.freed


def test_a_copy_from_locked_memory_reads_it_later_and_one_from_pageable_memory_does_not():
    for is_locked, wanted in ((True, {1}), (False, {0})):
        machine = lazy()
        held = host_memory(machine, is_locked=is_locked)
        target = sevens()
        target.copy_(held, non_blocking=True)
        machine.host_writes("a write", held.numpy())
        held.fill_(1)
        assert values(target.cpu()) == wanted
        assert bool(machine.races) == is_locked


def test_a_copy_to_pageable_memory_is_complete_on_return():
    machine = lazy()
    held = host_memory(machine, is_locked=False)
    held.copy_(sevens(), non_blocking=True)
    assert values(held) == {7}


def test_memory_is_not_unlocked_under_a_copy_and_no_copy_crosses_an_edge():
    machine = lazy()
    held = host_memory(machine)
    held.copy_(sevens(), non_blocking=True)
    assert machine.unregister(held.data_ptr()) == 0
    assert machine.races == ["host memory is unlocked under copy to the host"]
    machine.register(held.data_ptr(), COUNT // 2)
    with pytest.raises(DeviceError, match="crosses the edge"):
        held.copy_(sevens(), non_blocking=True)


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_host_memory_is_locked_while_the_engine_captures_its_graphs(mode):
    """As vLLM does at its start. In a thread that cares nothing, the driver refuses the call and breaks the capture."""
    machine = begin()
    memory = page_aligned(COUNT)
    address = int(memory.ctypes.data)
    lock = cuda_page_lock(mode)
    assert lock is not None
    with machine.capture():
        unlock = lock(address, COUNT)
        wait_until(lambda: address in machine.pinned, "the lock", 10.0)
    unlock()
    assert not machine.pinned
    with pytest.raises(DeviceError, match="during capture"), machine.capture():
        assert machine.register(address, COUNT) == 900


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_host_memory_is_locked_from_the_device_of_the_thread_that_asks(mode):
    """Each thread begins with device 0, where a context of its own would take memory from another engine."""
    machine, devices = begin(), []
    real = machine.register
    machine.register = lambda *given: devices.append(torch.cuda.current_device()) or real(*given)
    torch.cuda.set_device(1)
    lock = cuda_page_lock(mode)
    assert lock is not None
    memory = page_aligned(COUNT)
    unlock = lock(int(memory.ctypes.data), COUNT)
    wait_until(lambda: machine.pinned, "the lock", 10.0)
    unlock()
    assert devices == [1]


def test_an_operation_that_fails_breaks_the_device():
    lazy()
    torch.index_select(sevens(), 0, torch.tensor([COUNT], device="cuda"))
    with pytest.raises(DeviceError, match="assert triggered"):
        torch.cuda.synchronize()


# ---- threads and the rest of torch -------------------------------------------------------------------------------


def test_each_thread_has_its_own_current_stream():
    begin()
    stream = torch.cuda.Stream()
    found = []
    with torch.cuda.stream(stream):
        thread = threading.Thread(target=lambda: found.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
        assert torch.cuda.current_stream() == stream
    assert found == [torch.cuda.default_stream()]


def test_threads_take_turns_by_the_seed():
    def trace(seed: int) -> list[int]:
        machine, order = begin(seed), []

        def work(number: int) -> None:
            for _ in range(3):
                machine.launch("work", lambda: None)
                order.append(number)

        machine.turns.together(lambda: work(1), lambda: work(2))
        return order

    assert trace(5) == trace(5)
    assert len({tuple(trace(seed)) for seed in range(10)}) > 3


@torch.no_grad()
def test_torch_computes_on_it_as_on_a_cpu():
    machine = begin(2)
    generator = torch.Generator().manual_seed(1)
    layer = torch.nn.Linear(8, 4)
    given = torch.randn(3, 8, generator=generator)
    wanted = torch.nn.functional.softmax(layer(given), -1).topk(2)
    found = torch.nn.functional.softmax(layer.to("cuda")(given.to("cuda")), -1).topk(2)
    assert torch.equal(found.indices.cpu(), wanted.indices)
    assert torch.allclose(found.values.cpu(), wanted.values)
    assert found.values[0].sum().item() > 0
    assert not machine.races
