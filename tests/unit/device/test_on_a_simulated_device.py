"""What kvtier does with a CUDA device, on a simulated one: tests of a real GPU, contracts, deadlines, weights."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.gpu import test_cuda_copies as on_gpu  # noqa: E402 - after the check
from tests.gpu import test_transformers_on_gpu as transformers_on_gpu  # noqa: E402
from tests.simulated_cuda import Machine, begin, installed  # noqa: E402
from tests.unit.connect import test_vllm_copier as vllm_on_gpu  # noqa: E402
from tests.vllm_world import made  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

from kvtier.connect.vllm.geometry import Geometry  # noqa: E402
from kvtier.connect.vllm.worker.copier import open_copier  # noqa: E402
from kvtier.connect.vllm.worker.weight_changes import WeightSample  # noqa: E402
from kvtier.runtime.arena import Arena  # noqa: E402
from kvtier.runtime.command_runner import CommandRunner  # noqa: E402
from kvtier.runtime.executor import Completion  # noqa: E402
from kvtier.runtime.mover import Mover  # noqa: E402
from kvtier.types import Cancel, ChunkKey, Direction, Outcome, RequestId, Transfer  # noqa: E402

WAIT_S = 30.0
PART_BYTES = 4096


@pytest.fixture(autouse=True)
def machine() -> Iterator[Machine]:
    with installed():
        yield begin(4, part_bytes=PART_BYTES, host_part_bytes=PART_BYTES)


# ---- tests of a real GPU -----------------------------------------------------------------------------------------


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu.World, "chunks", 4)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("is_locked", [True, False])
def test_there_and_back(machine, is_locked):
    on_gpu.test_there_and_back(is_locked)
    assert not machine.races


@pytest.mark.usefixtures("_small")
def test_a_gather_waits_for_what_the_engine_has_queued(machine):
    on_gpu.test_a_gather_waits_for_what_the_engine_has_queued()
    assert machine.races, "its negative control reads too early"


@pytest.mark.usefixtures("_small")
def test_the_default_stream_is_not_waited_for(machine):
    on_gpu.test_the_default_stream_is_not_waited_for()
    assert not machine.races


def test_a_mapping_is_locked_in_parts(monkeypatch):
    on_gpu.test_a_mapping_is_locked_in_parts_and_copies_do_not_cross_them(monkeypatch)


@pytest.mark.parametrize("case", ["llama32", "gdn"])
def test_a_chunk_goes_to_a_gpu_and_back(machine, case):
    vllm_on_gpu.test_a_chunk_goes_to_a_gpu_and_back(case)
    assert not machine.races


def test_copies_wait_for_a_noted_step(machine):
    vllm_on_gpu.test_copies_wait_for_a_noted_step()
    assert not machine.races


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("copies", [on_gpu.test_there_and_back, vllm_on_gpu.test_a_chunk_goes_to_a_gpu_and_back])
def test_a_thread_that_copies_is_first_on_the_device_of_the_memory(monkeypatch, copies):
    """Else it would be on device 0, and its first call would take some hundred MiB there."""
    seen: list[str] = []
    for name in ("set_device", "stream"):
        inner = getattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, lambda it, name=name, inner=inner: (seen.append(name), inner(it))[1])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(copies, False if copies is on_gpu.test_there_and_back else "llama32").result(WAIT_S)
    assert seen[:2] == ["set_device", "stream"]


# ---- the mover ---------------------------------------------------------------------------------------------------


def test_an_overdue_or_cancelled_copy_keeps_its_slot_until_the_device_has_ended_it(machine):
    engine = made("LBHNC")
    size = max(tensor.size for tensor in engine.config.kv_cache_tensors)
    memory = torch.full((size,), 7, dtype=torch.int8, device="cuda")
    tensors = {
        name: memory.view(torch.bfloat16).as_strided(view["shape"], view["stride"], view["offset"])
        for name, view in engine.views.items()
    }
    copier = open_copier(Geometry.of(engine.config), engine.config, tensors, engine.layers)
    layout = copier.pages.layout
    arena = Arena(layout, [2], page_lock=lambda address, size, _slot: machine.register(address, size) or (lambda: None))
    ended: list[Completion] = []
    mover = Mover(
        CommandRunner(
            layout=layout,
            model=bytes(16),
            arena=arena,
            copier=copier,
            tiers={},
        )
    )
    mover.complete_to(ended.append)
    with machine.held():
        copier.note_step()
        what = ChunkKey(bytes(16)), 0, 1, "", RequestId("r"), tuple(range(1, 9)), None, 0
        deadline_s = time.monotonic() + 1.0  # a busy machine begins the copy in this time
        mover.submit(Transfer(1, Direction.GATHER, *what, deadline_s, None))
        wait_until(lambda: copier._running, "the copy", WAIT_S)
        mover.submit(Cancel((1,)))
        time.sleep(deadline_s + 0.1 - time.monotonic())
        assert not mover.close(0.1)
        assert not ended
    wait_until(lambda: ended, "the end", WAIT_S)
    assert ended[0].outcome is Outcome.DONE
    machine.host_reads("a reader", arena.payload(0, 1))
    payload = np.frombuffer(arena.payload(0, 1), np.uint8)
    for offset, count in zip(layout.groups[0].layer_offsets, layout.groups[0].layer_bytes, strict=True):
        assert (payload[offset : offset + count] == 7).all()
    assert not machine.races
    assert mover.close(WAIT_S)


# ---- weights -----------------------------------------------------------------------------------------------------


def test_weights_are_compared_while_the_engines_stream_holds_steps(machine, monkeypatch):
    monkeypatch.setattr("kvtier.connect.vllm.worker.weight_changes.SAMPLE_S", 0.0)
    model = torch.nn.Linear(64, 64).to("cuda")
    with torch.no_grad():
        sample = WeightSample(model)
        with machine.held():
            assert not sample.look()
        assert not machine.races
        model.weight.data[32].fill_(3.0)
        torch.cuda.synchronize()
        assert sample.look() == "parameters were written in place"
        assert not sample.look(is_reset=True)
        model.weight = torch.nn.Parameter(model.weight.data + 1)
        assert sample.look() == "parameters were replaced"
    assert not machine.races


# ---- Transformers ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_model_restored_on_a_device_goes_on_with_the_same_tokens(machine, monkeypatch, tmp_path):
    """A whole session, with its threads; half a minute."""
    monkeypatch.setattr(transformers_on_gpu, "DEVICE", "cuda")
    transformers_on_gpu.test_restored_from_each_place("64MiB", tmp_path)
    assert not machine.races
