"""Weights that change while an engine runs are noticed, and what does not change them is not."""

from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch

from kvtier.connect.vllm import sides
from kvtier.connect.vllm import weights as module
from kvtier.connect.vllm.own_cache import OwnCache
from kvtier.connect.vllm.weights import WeightSample, on_stack, watch_calls
from kvtier.errors import ConfigError


class Executor:
    """`vllm.v1.executor.abstract.Executor`."""

    def __init__(self) -> None:
        self.made = []

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.made.append((method, list(self.called)))
        return "result"

    def reload(self):
        """As vLLM's executors call their own."""
        return self.collective_rpc("reload_weights")


@pytest.fixture
def watched():
    """An executor, and what is called before its calls."""
    executor, called = Executor(), []
    executor.called = called
    watch_calls(executor, lambda name, adapter: called.append((name, adapter)))
    return executor, called


def test_before_each_call_that_may_change_weights_the_engine_is_notified(watched):
    executor, called = watched

    def written(worker):
        pass

    for method in ("reload_weights", "apply_model", "sleep", "wake_up", "load_model", written, b"pickled", written):
        called.clear()
        assert executor.collective_rpc(method) == "result"
        name = method if isinstance(method, str) else "bytes" if isinstance(method, bytes) else written.__qualname__
        assert called == [(name, None)]
        assert executor.made[-1] == (method, called), "before the call, not after it"
    called.clear()
    executor.collective_rpc(method="update_weights", timeout=3.0)
    assert called == [("update_weights", None)]


def test_calls_that_change_no_weights_are_not_reported(watched):
    executor, called = watched
    for method in sorted(module.HARMLESS - {"add_lora"}):
        executor.collective_rpc(method)
    assert called == []
    assert len(executor.made) == len(module.HARMLESS) - 1
    executor.collective_rpc("add_lora", args=("adapter",))
    executor.collective_rpc("add_lora", None, ("adapter",), None)
    assert called == [("add_lora", "adapter")] * 2


def test_each_engine_of_a_process_is_notified_of_its_own_calls(watched):
    executor, called = watched
    other = Executor()
    other.called = others = []
    watch_calls(other, lambda name, _: others.append(name))
    other.reload()
    assert (called, others) == ([], ["reload_weights"])
    executor.reload()
    assert (called, others) == ([("reload_weights", None)], ["reload_weights"])


def test_a_call_with_other_arguments_is_made_all_the_same(watched):
    executor, called = watched
    assert executor.collective_rpc("add_lora", args=iter(["adapter"])) == "result"
    assert called == [("add_lora", None)]


# ---- the scheduler side --------------------------------------------------------------------------------------------


@pytest.fixture
def side(monkeypatch):
    for name in ("connect", "open_core", "KeyMaker", "StatsReader", "Scheduler"):
        monkeypatch.setattr(sides, name, MagicMock())
    monkeypatch.setattr(sides.support, "warnings", lambda *_, **__: ())
    setup = MagicMock(ranks=1, geometry=MagicMock(chunk_tokens=256, groups=()), identity=MagicMock(is_private=False))
    setup.config.tiers, setup.config.control.socket = (), None
    return sides.SchedulerSide(
        setup, [], *(MagicMock(),) * 3, extras_of=MagicMock(), hash_of=MagicMock(), wake=MagicMock()
    )


def test_a_call_stops_everything_and_an_adapter_is_identified(side):
    keys = side._keys
    side.called("add_lora", "adapter")
    assert keys.mock_calls == [call.loaded("adapter")]
    assert side.scheduler.weights_change.mock_calls == []
    side.called("reload_weights", None)
    assert side.scheduler.weights_change.mock_calls == [call("reload_weights()")]


def test_a_reset_that_the_scheduler_refuses_is_none(side):
    for answer in (False, True):
        side.scheduler.reset.return_value = answer
        assert side.reset() is answer


def test_a_scheduler_of_another_kind_is_refused():
    engine = SimpleNamespace(kv_cache_manager=None, requests={}, running=[])
    names = "finished_recving_kv_req_ids, failed_recving_kv_req_ids"
    with pytest.raises(ConfigError, match=rf"SimpleNamespace has no {names}: .*allowed: vLLM's schedulers"):
        OwnCache(engine, is_alone=True)


def test_the_model_is_found_on_the_stack():
    class Worker:
        def get_model(self) -> str:
            return "model"

        def initialize(self) -> object:
            return called()

    def called() -> object:
        return on_stack("get_model")()

    assert Worker().initialize() == "model"
    with pytest.raises(LookupError, match="no caller has get_model"):
        called()


@pytest.mark.parametrize("model", [None, object(), SimpleNamespace(named_modules=lambda: [("", None)])])
def test_a_model_that_cannot_be_sampled_stops_no_engine(model, monkeypatch, caplog):
    monkeypatch.setattr(module, "on_stack", lambda _: lambda: model)
    look = sides.look_at_weights(has_moving_experts=False)
    assert look(is_reset=True) == ""
    assert caplog.messages[0].startswith("kvtier cannot look at the model's weights")


# ---- parameters ----------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    layers = {f"l{number}": torch.nn.Linear(32, 32, dtype=torch.bfloat16) for number in range(70)}
    model = torch.nn.ModuleDict(layers).requires_grad_(requires_grad=False)
    model["l1"].weight = torch.nn.Parameter(torch.rand(64, 32).t()[4:], requires_grad=False)  # with gaps and strides
    with torch.inference_mode():  # without a version counter
        model["l2"].weight = torch.nn.Parameter(torch.rand(32, 32), requires_grad=False)
    return model


def _add(model, name):
    with torch.inference_mode():
        model[name].weight.add_(1)


def _write_data(model, name):
    model[name].weight.data.copy_(torch.zeros_like(model[name].weight))


def _replace(model, name):
    model[name].weight = torch.nn.Parameter(model[name].weight.clone(), requires_grad=False)


def _replace_data(model, name):
    model[name].weight.data = model[name].weight.clone()


@pytest.mark.parametrize("name", ["l0", "l1", "l2", "l69"])
@pytest.mark.parametrize("change", [_add, _write_data, _replace, _replace_data])
def test_a_change_of_a_parameter_is_reported_until_the_reset(model, change, name):
    sample = WeightSample(model)
    torch.nn.functional.linear(torch.rand(3, 32), model["l2"].weight)
    assert sample.look() == ""
    change(model, name)
    news = sample.look()
    assert news != ""
    assert sample._compared == [], "what was replaced is freed"
    assert sample.look() == news
    change(model, name)
    assert [sample.look(is_reset=True), sample.look()] == ["", ""]
    change(model, name)
    torch.nn.init.constant_(model[name].weight.data, 3)
    assert sample.look() != "", "also the second time"


def test_a_change_of_the_draft_model_is_reported(model):
    draft = torch.nn.Linear(32, 32, dtype=torch.bfloat16)
    sample = WeightSample(model, draft)
    assert sample.look() == ""
    draft.weight.data.add_(1)
    assert sample.look() == "parameters were written in place"


def test_load_weights_of_the_model_is_reported(model):
    model.load_weights = lambda weights: {"read": weights}
    sample = WeightSample(model)
    assert model.load_weights([1]) == {"read": [1]}
    assert sample.look() == "load_weights of the model was called"
    assert [sample.look(is_reset=True), sample.look()] == ["", ""]


def test_a_look_that_fails_counts_as_a_change_and_raises_nothing(model, monkeypatch):
    sample = WeightSample(model)
    monkeypatch.setattr(torch, "equal", None)
    assert sample.look() == "a look at them failed: TypeError(\"'NoneType' object is not callable\")"
    monkeypatch.undo()
    assert sample.look() != ""
    assert [sample.look(is_reset=True), sample.look()] == ["", ""]


@pytest.mark.parametrize(("name", "moves"), [("experts", True), ("text_experts", True), ("shared_experts", False)])
def test_experts_that_vllm_moves_are_not_compared(model, name, moves):
    model[name] = torch.nn.Linear(32, 32)
    for has_moving_experts in (True, False):
        sample = WeightSample(model, has_moving_experts=has_moving_experts)
        model[name].weight.data.add_(1)
        assert (sample.look() == "") == (has_moving_experts and moves)
