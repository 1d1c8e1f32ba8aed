"""A restored layer is used as soon as it is there; what does not come costs a second attempt, never a wrong token."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attaching import Attach
from tests.thread_streams import ThreadStreams
from tiny_transformers import batch, gemma3, llama, tokens
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvtier.connect.transformers import copier as module
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.connect.transformers.support import is_compiled
from kvtier.device.staged_copy import StagedCopy

pytestmark = pytest.mark.engine

LOGITS: dict[str, Any] = {
    "do_sample": False,
    "max_new_tokens": 6,
    "min_new_tokens": 6,
    "output_logits": True,
    "return_dict_in_generate": True,
}
WAIT_S = 20.0
CHUNKS = 6


def logits(output: Any) -> torch.Tensor:
    return torch.stack(output.logits)


def stored(kv: Any, input_ids: torch.Tensor) -> None:
    kv.generate(input_ids, **LOGITS)
    assert kv.flush()


class Reached(threading.Event):
    """Set when the model begins with a layer."""

    def __init__(self, model: PreTrainedModel, layer: int) -> None:
        super().__init__()
        self.layer = layer
        model.model.layers[layer].register_forward_pre_hook(lambda *_: self.set())


def held_until(monkeypatch: pytest.MonkeyPatch, reached: Reached) -> list[int]:
    """Let the last chunk of that layer come only when the model is there; the layers as they came."""
    carry, came, lock = CacheCopier._scatter_step, list[int](), threading.Lock()
    monkeypatch.setattr("kvtier.connect.transformers.copier.STEP_BYTES_MIN", 1)

    def late(self: CacheCopier, jobs: Any) -> None:
        rank = jobs[0].layers[jobs[0].step]
        with lock:
            came.append(rank)
            is_last = rank == reached.layer and came.count(rank) == CHUNKS
        if is_last:
            assert reached.wait(WAIT_S), "the model did not begin before the last layer was there"
        carry(self, jobs)

    monkeypatch.setattr(CacheCopier, "_scatter_step", late)
    return came


def carried_by(carry: Any, kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let something else move the layers of an attachment that is open."""
    copier = kv._current().restorer._copier
    monkeypatch.setattr(copier._layer_order, "_move", lambda jobs: carry(copier, jobs))


@pytest.mark.parametrize("layer", [1, 2])
def test_a_layer_computes_while_the_next_arrives(layer: int, attached: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    input_ids, _ = batch(tokens(100, 1))
    plain = model.generate(input_ids, **LOGITS)
    reached = Reached(model, layer)
    came = held_until(monkeypatch, reached)
    kv = attached(model)
    stored(kv, input_ids)
    reached.clear()
    warm = kv.generate(input_ids, **LOGITS)
    assert kv.last.restored_by_source == {"host": 96}
    assert torch.equal(warm.sequences, plain.sequences)
    torch.testing.assert_close(logits(warm), logits(plain), rtol=1e-4, atol=1e-4)
    assert [came.count(rank) for rank in range(3)] == [CHUNKS] * 3
    assert kv._current().restorer._copier._rows == {}


def test_without_it_the_model_waits_for_all_layers(attached: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: nothing goes layer by layer then."""
    model = llama()
    input_ids, _ = batch(tokens(100, 1))
    came = held_until(monkeypatch, Reached(model, 1))
    kv = attached(model, layerwise=False)
    stored(kv, input_ids)
    warm = kv.generate(input_ids, **LOGITS)
    assert kv.last.restored_by_source == {"host": 96}
    assert came == []
    torch.testing.assert_close(logits(warm), logits(model.generate(input_ids, **LOGITS)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("make", "bad"), [(llama, 0), (llama, 2), (gemma3, 0)])
def test_a_layer_that_does_not_come_costs_an_attempt_and_no_token(
    make: Any, bad: int, attached: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layers have been used by then: the call begins again with what is there."""
    model = make()
    input_ids, _ = batch(tokens(100, 1))
    monkeypatch.setattr("kvtier.connect.transformers.copier.STEP_BYTES_MIN", 1)
    kv = attached(model)
    stored(kv, input_ids)
    eager = attached(model, layerwise=False, directory=None)
    stored(eager, input_ids)
    wanted = eager.generate(input_ids, **LOGITS)
    carry = CacheCopier._scatter_step

    def failing(self: CacheCopier, jobs: Any) -> None:
        if jobs[0].step == bad and any(job.chunk.start == 48 for job in jobs):
            raise OSError("planned")
        carry(self, jobs)

    carried_by(failing, kv, monkeypatch)
    warm = kv.generate(input_ids, **LOGITS)
    assert torch.equal(warm.sequences, wanted.sequences)
    torch.testing.assert_close(logits(warm), logits(wanted), rtol=1e-4, atol=1e-4)
    assert kv.last.restored_tokens == 48, "up to the chunk that was missing, this time all at once"
    assert kv.last.uncached_reason == ""
    assert kv._current().restorer._copier._rows == {}
    monkeypatch.undo()
    kv.generate(input_ids, **LOGITS)
    assert kv.last.restored_tokens == 96


def test_a_layer_that_is_late_is_computed(attached: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    input_ids, _ = batch(tokens(100, 1))
    kv = attached(model, limits__load_deadline_s=0.05)
    stored(kv, input_ids)
    may_go_on, carry = threading.Event(), CacheCopier._scatter_step

    def hanging(self: CacheCopier, jobs: Any) -> None:
        assert may_go_on.wait(WAIT_S)
        carry(self, jobs)

    carried_by(hanging, kv, monkeypatch)
    monkeypatch.setattr("kvtier.connect.transformers.restore._END_S", 0.05)
    try:
        late = kv.generate(input_ids, **LOGITS)
        assert kv.last.restored_tokens == 0
        assert len(kv._current().restorer._copier._rows) == 1, "what still writes keeps its tensors"
    finally:
        may_go_on.set()
    assert torch.equal(logits(late), logits(model.generate(input_ids, **LOGITS)))


class Listener(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value)

    def end(self) -> None:
        pass


def test_a_streamer_hears_the_prompt_once(attached: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    input_ids, _ = batch(tokens(100, 1))
    kv = attached(model)
    stored(kv, input_ids)

    def failing(self: CacheCopier, jobs: Any) -> None:
        raise OSError("planned")

    carried_by(failing, kv, monkeypatch)
    listener = Listener()
    kv.generate(input_ids, streamer=listener, **LOGITS)
    assert [tuple(value.shape) for value in listener.heard] == [(1, 100)] + [(1,)] * 6
    assert kv.last.restored_tokens == 96


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_a_compiled_model_waits_for_all_layers() -> None:
    model = llama()
    assert not is_compiled(model)
    model.model.layers[1].compile()
    assert is_compiled(model)
    other = llama()
    other.forward = torch.compile(other.forward)
    assert is_compiled(other)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ThreadStreams]]:
    """Models lie on a device in threads, whose queues dawdle."""
    made: list[ThreadStreams] = []
    rng = random.Random(8)

    def staged(_device: torch.device) -> StagedCopy:
        made.append(ThreadStreams(lambda: rng.choice([0.0] * 199 + [1e-3])))
        return StagedCopy(made[-1])

    monkeypatch.setattr(module, "_staged_copy", staged)
    yield made
    for streams in made:
        assert all(stream.error is None for stream in streams.streams)
        streams.close()


@pytest.mark.parametrize("make", [llama, gemma3])
def test_on_a_device_that_dawdles_the_logits_are_the_same(
    make: Any, attached: Attach, device: list[ThreadStreams]
) -> None:
    """A batch with padding, through so little host memory that slots are used again at once."""
    model = make()
    input_ids, mask = batch(tokens(100, 1), tokens(61, 2))
    plain = model.generate(input_ids, attention_mask=mask, **LOGITS)
    kv = attached(model)
    kv.generate(input_ids, attention_mask=mask, **LOGITS)
    kv.close()
    reopened = attached(model, host__capacity_bytes="1MiB")
    warm = reopened.generate(input_ids, attention_mask=mask, **LOGITS)
    assert reopened.last.restored_by_source == {"directory": 87 + 48}
    assert torch.equal(warm.sequences, plain.sequences)
    torch.testing.assert_close(logits(warm), logits(plain), rtol=1e-4, atol=1e-4)
    assert len(device) == 2
