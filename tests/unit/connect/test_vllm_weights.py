"""Weights that change while an engine runs are noticed, and what does not change them is not."""

from contextlib import contextmanager, suppress
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch

from kvtier.connect.vllm import engine_hooks
from kvtier.connect.vllm.engine_hooks import WorkerCall, on_stack, watch_calls
from kvtier.connect.vllm.scheduler import scheduler_side
from kvtier.connect.vllm.scheduler.engine_cache import EngineCache
from kvtier.connect.vllm.worker import weight_changes as module
from kvtier.connect.vllm.worker import worker_side
from kvtier.connect.vllm.worker.weight_changes import WeightSample, digest_of
from kvtier.errors import ConfigError


class Executor:
    """`vllm.v1.executor.abstract.Executor`."""

    def __init__(self):
        self.made, self.called = [], []
        watch_calls(self, self.around, ["add_lora"])

    @contextmanager
    def around(self, call):
        self.called.append(call)
        yield
        self.called.append("after")

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        self.made.append((method, list(self.called)))
        return "result"

    def reload(self):
        """As vLLM's executors call their own."""
        return self.collective_rpc("reload_weights")


def test_each_call_that_may_change_weights_is_surrounded():
    def written(worker):
        pass

    for method in ("reload_weights", "apply_model", "sleep", "wake_up", "load_model", written, b"pickled"):
        executor = Executor()
        assert executor.collective_rpc(method) == "result"
        name = method if isinstance(method, str) else "bytes" if isinstance(method, bytes) else written.__qualname__
        call, after = executor.called
        assert (call, after) == (WorkerCall(name, (), {}, isinstance(method, str)), "after")
        assert executor.made == [(method, [call])]
    executor = Executor()
    executor.collective_rpc(method="sleep", timeout=3.0, kwargs={"level": 2})
    executor.collective_rpc("discard", None, (("kv_cache",),))
    executor.collective_rpc("reload_weights", non_block=True)
    sleep, discard, unawaited = executor.called[::2]
    assert [sleep.argument("level"), discard.argument("tags")] == [2, ("kv_cache",)]
    assert [sleep.argument("mode", "abort"), unawaited.is_plain] == ["abort", False]


def test_calls_that_change_no_weights_are_not_reported():
    executor = Executor()
    unseen = sorted(engine_hooks.HARMLESS - {"add_lora"})
    for method in unseen:
        executor.collective_rpc(method)
    assert executor.called == []
    assert [method for method, _ in executor.made] == unseen
    executor.collective_rpc("add_lora", args=("adapter",))
    executor.collective_rpc("add_lora", None, ("adapter",), None)
    assert [it.args for it in executor.called[::2]] == [("adapter",)] * 2


def test_each_engine_of_a_process_is_notified_of_its_own_calls():
    executor, other = Executor(), Executor()
    other.reload()
    assert (len(executor.called), len(other.called)) == (0, 2)


def test_a_call_with_other_arguments_is_made_all_the_same():
    executor = Executor()
    assert executor.collective_rpc("add_lora", args=iter(["adapter"])) == "result"
    assert executor.called[0] == WorkerCall("add_lora", (), {}, is_plain=True)


# ---- the scheduler side --------------------------------------------------------------------------------------------


@pytest.fixture
def open_side(monkeypatch):
    for name in ("connect", "open_core", "KeyMaker", "StatsReader", "Scheduler"):
        monkeypatch.setattr(scheduler_side, name, MagicMock())
    monkeypatch.setattr(scheduler_side.support, "transfer_warnings", lambda *_, **__: ())
    setup = MagicMock(ranks=1, geometry=MagicMock(chunk_tokens=256, groups=()), identity=MagicMock(is_private=False))
    setup.config.tiers, setup.config.control.socket, setup.config.vllm.sleep_frees_host = (), None, False
    return lambda: scheduler_side.SchedulerSide(
        *(setup, [], [MagicMock(groups=())]),
        *(MagicMock(),) * 3,
        extras_of=MagicMock(),
        hash_of=MagicMock(),
        wake=MagicMock(),
        ask=MagicMock(return_value=[b"digest"]),
    )


@pytest.fixture
def side(open_side):
    return open_side()


@pytest.mark.parametrize("part", ["KeyMaker", "Scheduler", "WeightCalls"])
def test_a_scheduler_side_that_does_not_open_closes_its_session(open_side, monkeypatch, part):
    monkeypatch.setattr(scheduler_side, part, MagicMock(side_effect=ConfigError("wrong")))
    with pytest.raises(ConfigError, match="wrong"):
        open_side()
    assert scheduler_side.open_core.return_value.session.close.call_count == 1


def test_a_reset_of_the_encoder_stops_nothing_and_is_trusted_only_once_it_is_over(side):
    side.calls = MagicMock()
    for is_plain in (False, True):
        with side.around(WorkerCall("reset_encoder_cache", (), {}, is_plain)):
            assert side.calls.mock_calls == []
        assert side.calls.mock_calls == [call.encoder_was_reset()] * is_plain


def test_a_call_stops_everything_and_an_adapter_is_identified(side):
    with side.around(WorkerCall("add_lora", ("adapter",), {}, is_plain=True)):
        assert side._keys.mock_calls[-1] == call.loaded("adapter")
    assert side.scheduler.invalidation.weights_change.mock_calls == []
    for name, is_plain in (("apply_model", True), ("reload_weights", False)):
        with side.around(WorkerCall(name, (), {}, is_plain)):
            assert side.scheduler.invalidation.weights_change.mock_calls[-1] == call(f"{name}()")
    assert side.scheduler.invalidation.go_on.mock_calls == [], "until a reset"


def test_known_changes_go_on_when_they_are_complete(side):
    digests = iter([[b"old"], [b"new"], [b"old"], [None]])
    side.calls._ask = lambda how: next(digests) if how.startswith("digest") else [True]
    side._keys.weights = b""
    side._keys.own = (False, set())

    def make(name, **given):
        with side.around(WorkerCall(name, (), given, is_plain=True)):
            assert side.scheduler.invalidation.stop.called
        return side._keys.weights, side.scheduler.invalidation.go_on.call_count

    assert make("start_weight_update") == make("update_weights") == (b"", 0)
    new, went_on = make("finish_weight_update")
    assert (len(new), went_on) == (32, 1)
    assert make("reload_weights") == (b"", 2), "those of the start"
    private, _ = make("reload_weights")
    assert len(private) == 32, "random"
    assert side._keys.are_weights_private
    with suppress(ValueError), side.around(WorkerCall("reload_weights", (), {}, is_plain=True)):
        raise ValueError
    assert side.scheduler.invalidation.go_on.call_count == 3, "the weights are unknown"
    side.reset()
    assert side.scheduler.invalidation.go_on.call_count == 4, "a user says that they are complete"


def test_sleep_goes_on_when_all_of_the_engine_is_awake(side):
    asked = []
    side.calls._ask = lambda how: asked.append(how) or [b"digest"]
    side._keys.own = (False, set())

    def make(name, **given):
        with side.around(WorkerCall(name, (), given, is_plain=True)):
            pass
        return side.scheduler.invalidation.go_on.call_count

    assert make("sleep", level=1) == make("wake_up", tags=["kv_cache"]) == 0
    assert asked == ["sleep"], "before the weights are awake no copy is made"
    assert make("wake_up", tags=None) == 1
    assert asked == ["sleep", "wake_up"]
    assert make("discard", tags=("kv_cache",)) == 1
    assert make("wake_up", tags=["kv_cache"]) == 2
    assert make("sleep", level=2) == make("wake_up") == 2, "the weights are lost"
    assert make("reload_weights") == 3


def test_host_memory_that_stays_is_counted_once(side, caplog):
    side._keys.own = (False, set())
    side.calls._lender = lender = MagicMock()
    lender.emptied = lambda act, wait_s: act() is None
    for kept in ([(0, 0), (0, 0)], [(70, 0), (70, 5)], [(70, 0), (70, 5)]):
        side.calls._ask = {"free_host": kept}.get
        for name in ("sleep", "wake_up"):
            with side.around(WorkerCall(name, (), {"level": 1}, is_plain=True)):
                pass
    (message,) = caplog.messages
    assert "70 bytes of host memory that ranks share, and 5 bytes that may still be page-locked" in message


def test_a_reset_that_the_scheduler_refuses_is_none(side):
    for answer in (False, True):
        side.scheduler.invalidation.reset.return_value = answer
        assert side.reset() is answer


def test_a_scheduler_of_another_kind_is_refused():
    engine = SimpleNamespace(kv_cache_manager=None, requests={}, running=[])
    names = "finished_recving_kv_req_ids, failed_recving_kv_req_ids"
    with pytest.raises(ConfigError, match=rf"SimpleNamespace has no {names}: .*use one of vLLM's schedulers"):
        EngineCache(engine, is_alone=True, has_prefix_caching=True, protects_prefixes=True, guarded=lambda act: act)


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
    monkeypatch.setattr(engine_hooks, "on_stack", lambda _: lambda: model)
    models, look = worker_side.look_at_weights(has_moving_experts=False)
    assert (models, look(is_reset=True)) == ([], "")
    assert caplog.messages[0].startswith("kvtier cannot inspect the model's weights")


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
    assert sample.look() == "comparing them failed: TypeError(\"'NoneType' object is not callable\")"
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


# ---- the digest ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [_add, _write_data])
@pytest.mark.parametrize("name", ["l0", "l69"])
def test_the_digest_covers_every_element_and_no_place(model, change, name, monkeypatch):
    monkeypatch.setattr(module, "DIGEST_PART_BYTES", 1000)
    before = digest_of([model])
    _replace_data(model, name)
    assert digest_of([model]) == before, "the same numbers elsewhere"
    change(model, name)
    assert digest_of([model]) != before
    changed = digest_of([model])
    model["l1"].weight.data[-1, -1] += 1
    assert digest_of([model]) != changed, "the last element of one with gaps"


def test_the_digest_covers_what_is_derived_from_parameters(model):
    model["l0"].derived, model["l0"].scale, model["l0"].count = torch.ones(3), 1.0, 1
    model["l1"].kv_cache = torch.ones(3)
    others = [model["l1"].kv_cache.untyped_storage().data_ptr()]
    before = digest_of([model], others)
    model["l1"].kv_cache.add_(1)
    model["l0"].count += 1
    assert digest_of([model], others) == before
    model["l0"].scale = 2.0
    assert digest_of([model], others) != before
    model["l0"].scale = 1.0
    model["l0"].derived[2] = 5
    assert digest_of([model], others) != before


def test_weights_that_cannot_be_read_have_no_digest(model):
    assert digest_of([model, torch.nn.Linear(3, 3, device="meta")]) is None
    model["l0"].weight = torch.nn.Parameter(torch.empty(0))
    assert digest_of([model]) is None, "packed elsewhere"


class Held:
    """As vLLM's implementation of attention: beside the modules, with tensors of its own."""

    __slots__ = ("__dict__", "slopes")

    def __init__(self) -> None:
        self.slopes = torch.tensor([0.5, 0.25])
        self.scales, self.by_name, self.scale = [(torch.ones(2),)], {"k": torch.ones(2)}, 0.5
        self.kernel = torch.nn.Linear(2, 2)
        self.kernel.weight.data.fill_(1.0)
        self.kernel.bias.data.fill_(1.0)
        self.owner, self.later = self, torch.empty(2, device="meta")


def _fill(tensor):
    tensor.fill_(float("nan"))


@pytest.mark.parametrize(
    "lose",
    [
        lambda held: _fill(held.slopes),
        lambda held: _fill(held.scales[0][0]),
        lambda held: _fill(held.by_name["k"]),
        lambda held: _fill(held.kernel.weight.data),
        lambda held: setattr(held, "scale", 2.0),
    ],
)
def test_the_digest_covers_what_objects_hold_that_are_no_modules(model, lose):
    model["l0"].impl = Held()
    before = digest_of([model])
    model["l0"].impl = Held()
    assert digest_of([model]) == before is not None, "as in another engine"
    lose(model["l0"].impl)
    assert digest_of([model]) != before


def test_the_digest_leaves_out_what_steps_leave_behind_and_has_a_limit(model, monkeypatch):
    model["l0"].impl = held = Held()
    before = digest_of([model])
    monkeypatch.setattr(Held, "__module__", "vllm.compilation.cuda_graph")
    without = digest_of([model])
    _fill(held.slopes)
    assert digest_of([model]) == without != before
    monkeypatch.setattr(module, "HELD_MAX", 73)
    monkeypatch.setattr(Held, "__module__", "vllm.v1.attention")
    with pytest.raises(ValueError, match="more than 73 objects"):
        digest_of([model])
