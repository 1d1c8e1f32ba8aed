"""vLLM's asynchronous scheduling on a CPU: a step runs after the engine has scheduled the next one, as on a GPU.

`apply` is called in the engine's process before the engine is built. It is for one worker in that process.

Real, and unchanged:

- vLLM's choice of `AsyncScheduler` and of a queue of two batches (the CPU platform's switch alone is lifted);
- its scheduler, its engine core (`step_with_batch_queue`), its connector calls, and all of kvtier;
- its model runner, with sampled tokens that stay on the "device" (`AsyncGPUModelRunnerOutput`).

Doubled:

- the device. A launch only queues a step, with a pickled copy of what was scheduled. A thread runs the runner's
  `execute_model` and `sample_tokens` later. A seed decides: at once, after a pause, or when the result is waited for.
- the connector's worker calls. The launch makes them, in the order and by the code of vLLM's mixin. So they come before
  the step's forward, and mostly before that of the step before it. With an even seed they are queued before the step:
  a worker in another process may be behind the scheduler. The runner itself sees no connector.
- the runner's bookkeeping and zeroing of blocks run with the forward. On a GPU the bookkeeping runs at the launch.
- `torch.cuda.Stream`, `torch.cuda.Event` and `torch.Event`. A copy that does not block is a queued operation. Its
  target is poisoned until another thread makes the copy, in the order of its stream. Streams have no order among them
  but their waits. `Event.query` is False at first, even if the copy is over.
- calls of workers, and `torch.accelerator.synchronize`: they wait for all steps before them, as on one stream.
- an adapter that is not loaded yet is loaded at the launch, after the steps before it.
"""

import itertools
import os
import pickle
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SEED = "ASYNCHRONOUS_SEED"
PAUSE_S, LIMIT_S = 0.004, 120.0
POISON = 1_000_003
"""Stands in place of numbers that are not there yet; it is neither a token nor a position."""

counts: Counter[str] = Counter()
"""What was seen; see `told`."""


class Operation:
    """An operation that a stream does some time after it was queued.

    Args:
        act: does it.
        after: operations of other streams that come first.
        pause_s: how long it waits at least; None: until someone waits for it.
    """

    def __init__(self, act: Callable[[], Any], after: list["Operation"], pause_s: float | None) -> None:
        self.act, self.after, self.pause_s = act, after, pause_s
        # What a step queues is as old as the step, and older than the steps that were queued meanwhile.
        now = getattr(_current, "operation", None)
        self.number = (next(_numbers), 0) if now is None else (now.number[0], next(_numbers))
        self.queued_s = time.monotonic()
        self.is_wanted = self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def want(self) -> None:
        """Let it run now, with all that must come before it."""
        self.is_wanted = True
        for other in self.after:
            other.want()

    @property
    def is_due(self) -> bool:
        """Whether nothing holds it but the operations before it on its own stream."""
        is_ripe = self.pause_s is not None and time.monotonic() >= self.queued_s + self.pause_s
        return (self.is_wanted or is_ripe) and all(it.is_done for it in self.after)


_numbers = itertools.count(1)
_changed = threading.Condition(threading.RLock())
_draw = random.Random()
_current = threading.local()


class Stream:
    """A queue of operations; doubles `torch.cuda.Stream`. Arguments are ignored."""

    every: "list[Stream]" = []  # noqa: RUF012 - of the class
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        self.waiting: deque[Operation] = deque()
        self.last: Operation | None = None
        self.first_of_next: list[Operation] = []
        with _changed:
            Stream.every.append(self)

    def queue(self, act: Callable[[], Any], pause_s: float | None) -> Operation:
        """Queue an operation behind those before it, and behind what the stream waits for."""
        with _changed:
            operation = Operation(act, self.first_of_next, pause_s)
            self.first_of_next = []
            self.waiting.append(operation)
            self.last = operation
            _changed.notify_all()
        return operation

    def wait_stream(self, other: "Stream") -> None:
        """Order what is queued from now on after what `other` has now: nothing, if this thread computes its steps."""
        if other is compute and on_device():
            return
        if other.last is not None and not other.last.is_done:
            self.first_of_next.append(other.last)

    def wait_event(self, event: "Event") -> None:
        """Order what is queued from now on after `event`."""
        if event.after is not None and not event.after.is_done:
            self.first_of_next.append(event.after)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Mark what has been queued so far."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for all that has been queued."""
        if self.last is not None:
            wait(self.last, self)

    def take(self) -> Operation | None:
        """The next operation, if it may run."""
        return self.waiting[0] if self.waiting and self.waiting[0].is_due else None


class Event:
    """A mark in a stream; doubles `torch.cuda.Event` and `torch.Event`. Arguments are ignored."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.after: Operation | None = None
        self._stream: Stream | None = None
        self._polls = 0

    def record(self, stream: Stream | None = None) -> None:
        """Mark what has been queued on `stream` so far. A thread that computes on the device has no queue before it."""
        self._stream = stream or current_stream()
        self.after = None if self._stream is compute and on_device() else self._stream.last
        self._polls = _draw.randrange(3)

    def synchronize(self) -> None:
        """Wait for what was marked."""
        if self.after is not None and self._stream is not None:
            counts["waits for copies"] += not self.after.is_done
            wait(self.after, self._stream)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Whether what was marked is over; not at once, even if it is."""
        self._polls -= 1
        return self._polls < 0 and (self.after is None or self.after.is_done)


compute = Stream()
"""The engine's stream: steps."""


def current_stream(*_: Any) -> Stream:
    """Return the stream of this thread."""
    return getattr(_current, "stream", compute)


def on_device() -> bool:
    """Whether this thread runs the steps."""
    return getattr(_current, "is_device", False)


def wait(operation: Operation, stream: Stream) -> None:
    """Wait until an operation, and all before it on its stream, are over; raise its error.

    Raises:
        TimeoutError: they are not over in time.
    """
    until_s = time.monotonic() + LIMIT_S
    with _changed:
        for other in stream.waiting:
            other.want()
            if other is operation:
                break
        operation.want()
        _changed.notify_all()
        while not operation.is_done:
            if not _changed.wait(until_s - time.monotonic()):
                raise TimeoutError(f"the device hangs: {[len(it.waiting) for it in Stream.every]}")
    if operation.error is not None:
        raise operation.error


def drain() -> None:
    """Wait for all steps and copies, as a call does that synchronizes the device."""
    for stream in list(Stream.every):
        if not (stream is compute and on_device()):
            stream.synchronize()


def _run(*, is_device: bool) -> None:
    """Execute operations for ever: the steps, or the copies of all other streams in any order."""
    _current.is_device = is_device
    while True:
        with _changed:
            streams = [compute] if is_device else [it for it in Stream.every if it is not compute]
            due = [it for it in streams if it.take() is not None]
            if not due:
                _changed.wait(0.001 if any(it.waiting for it in streams) else None)
                continue
            stream = _draw.choice(due)
            operation = stream.waiting[0]
        _current.operation = operation
        try:
            operation.result = operation.act()
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            operation.error = error
        with _changed:
            copies = [it.waiting[0] for it in Stream.every if it not in (compute, stream) and it.waiting]
            what = "steps that overtook a copy" if is_device else "copies that overtook a copy"
            counts[what] += any(it.number < operation.number for it in copies)
            operation.is_done = True
            stream.waiting.popleft()
            _changed.notify_all()


class _Copies(TorchFunctionMode):
    """Copies that do not block are queued on a stream, and their targets poisoned."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.to, torch.Tensor.copy_) and kwargs.get("non_blocking"):
            source = args[0] if func is torch.Tensor.to else args[1]
            return self._copied(torch.empty_like(source) if func is torch.Tensor.to else args[0], source)
        return func(*args, **kwargs)

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target.fill_(float("nan") if target.is_floating_point() else min(POISON, torch.iinfo(target.dtype).max))

        def copy() -> None:
            with torch.inference_mode():
                target.copy_(source)

        counts["copies"] += 1
        self.stream.queue(copy, _pause())
        return target


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Doubles `torch.cuda.stream`."""
    before, _current.stream = current_stream(), stream
    try:
        with _Copies(stream):
            yield
    finally:
        _current.stream = before


def _pause() -> float | None:
    return _draw.choice((0.0, _draw.random() * PAUSE_S, None, None))


def _worker(*, is_behind: bool) -> None:
    """Let vLLM's worker queue its steps.

    Args:
        is_behind: the connector's calls are queued, too.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, LogprobsTensors, ModelRunnerOutput
    from vllm.v1.worker import cpu_model_runner, gpu_model_runner, kv_connector_model_runner_mixin
    from vllm.v1.worker.cpu_worker import CPUWorker

    mixin = kv_connector_model_runner_mixin.KVConnectorModelRunnerMixin

    class Later(AsyncModelRunnerOutput):
        """The result of a step, when it is waited for."""

        def __init__(self, operation: Operation, told: Callable[[], Any]) -> None:
            self.operation, self.told = operation, told

        def get_output(self) -> Any:
            """Wait for the step, and for the copy of its tokens."""
            counts["results that were not there"] += not self.operation.is_done
            wait(self.operation, compute)
            found = self.operation.result
            if found is EMPTY_MODEL_RUNNER_OUTPUT:
                return ModelRunnerOutput.with_kv_conn_output_only(self.told())
            if isinstance(found, AsyncModelRunnerOutput):
                found = found.get_output()
            found.kv_connector_output = self.told()
            return found

    def launch(act: Callable[..., Any], given: bytes) -> Operation:
        return compute.queue(lambda: act(pickle.loads(given)), _pause())

    def finalize() -> None:
        if has_kv_transfer_group():
            get_kv_transfer_group().wait_for_save()
            get_kv_transfer_group().clear_connector_metadata()

    def execute_model(worker: Any, output: Any) -> Any:
        runner, tokens = worker.model_runner, output.total_num_scheduled_tokens
        with _changed:
            is_pending = any(not it.is_done for it in compute.waiting)
        counts["steps"] += tokens > 0
        counts["steps launched before the forward before them"] += is_pending and tokens > 0
        orders, output.kv_connector_metadata = output.kv_connector_metadata, None
        given, output.kv_connector_metadata = pickle.dumps(output), orders
        found: list[Any] = [None]

        def begin() -> None:
            if has_kv_transfer_group():
                get_kv_transfer_group().handle_preemptions(orders)
            if getattr(runner, "lora_manager", None) is not None:
                _load_adapters(runner, output)

        def tell() -> None:
            if has_kv_transfer_group():
                is_deferred = runner.speculative_config is not None and tokens > 0
                with mixin._get_kv_connector_output(output, defer_finalize=is_deferred) as found[0]:
                    pass

        if is_behind:
            counts["late connector calls"] += 1
            compute.queue(lambda: (begin(), tell()), _pause())
            launched = launch(runner.execute_model, given)
        else:
            begin()
            launched = launch(runner.execute_model, given)
            tell()
            counts["connector calls before the forward"] += not launched.is_done
        if not tokens:
            later = Later(launched, lambda: found[0])
            return later if is_behind else ModelRunnerOutput.with_kv_conn_output_only(found[0])
        runner.told_later = lambda: found[0]
        return None

    def sample_tokens(worker: Any, grammar_output: Any) -> Any:
        runner, act = worker.model_runner, worker.model_runner.sample_tokens
        is_deferred = runner.speculative_config is not None

        def and_finalize(given: Any) -> Any:
            result = act(given)
            finalize()
            return result

        operation = launch(and_finalize if is_behind and is_deferred else act, pickle.dumps(grammar_output))
        if is_deferred and not is_behind:
            finalize()
        return Later(operation, runner.told_later)

    CPUWorker.execute_model, CPUWorker.sample_tokens = execute_model, sample_tokens  # type: ignore[method-assign]
    for module in (gpu_model_runner, kv_connector_model_runner_mixin):
        module.has_kv_transfer_group = lambda: has_kv_transfer_group() and not on_device()
    # No connector here looks at it, and it is a variable of the module, which the device's thread sets.
    kv_connector_model_runner_mixin.get_forward_context = lambda: None

    @contextmanager
    def no_wrapper() -> Iterator[None]:
        yield

    cpu_model_runner._torch_cuda_wrapper = no_wrapper  # type: ignore[assignment]
    cpu_model_runner._set_torch_accelerator_to_noop = lambda: None
    cpu_model_runner.CPUModelRunner._sync_device = lambda _: drain()  # type: ignore[method-assign]

    def copied(tensors: LogprobsTensors) -> LogprobsTensors:
        fields = (tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks)
        return LogprobsTensors(*(it.to("cpu", non_blocking=True) for it in fields), *tensors[3:])

    LogprobsTensors.to_cpu_nonblocking = copied  # type: ignore[method-assign]


def _load_adapters(runner: Any, output: Any) -> None:
    """Load the adapters of requests that begin, as `set_active_loras` does on a GPU before the forward's launch."""
    new = [it.lora_request for it in output.scheduled_new_reqs if it.lora_request is not None]
    if any(it.lora_int_id not in runner.lora_manager.list_adapters() for it in new):
        if not on_device():
            compute.synchronize()
        for request in new:
            runner.lora_manager.add_adapter(request)


def _calls() -> None:
    """Let calls of workers wait for the steps before them."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    inner = UniProcExecutor.collective_rpc

    def collective_rpc(executor: Any, method: Any, *arguments: Any, **named: Any) -> Any:
        if method not in ("execute_model", "sample_tokens"):
            drain()
        return inner(executor, method, *arguments, **named)

    UniProcExecutor.collective_rpc = collective_rpc  # type: ignore[method-assign]


def _platform() -> None:
    """Let vLLM's own choice stand."""
    from vllm.platforms.cpu import CpuPlatform

    inner = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(platform: Any, config: Any) -> None:
        chosen = config.scheduler_config.async_scheduling
        inner(platform, config)
        config.scheduler_config.async_scheduling = chosen and config.parallel_config.world_size == 1

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[method-assign]


def apply() -> None:
    """Make this process's engine asynchronous."""
    seed = int(os.environ.get(SEED, "1"))
    _draw.seed(seed)
    torch.Event = torch.cuda.Event = Event  # type: ignore[misc, assignment]
    torch.cuda.Stream, torch.cuda.stream = Stream, on_stream  # type: ignore[misc, assignment]
    torch.cuda.current_stream = current_stream  # type: ignore[assignment]
    torch.accelerator.synchronize = lambda *_: drain()
    torch.accelerator.empty_cache = lambda: None
    _platform()
    _calls()
    _worker(is_behind=seed % 2 == 0)
    for is_device in (True, False):
        threading.Thread(target=_run, kwargs={"is_device": is_device}, daemon=True).start()


def read_early() -> None:
    """Nobody waits for the copy of sampled tokens: the control of the doubles."""
    Event.synchronize = lambda self: None  # type: ignore[method-assign]


def told(engine: Any) -> dict[str, Any]:
    """What was seen, and what vLLM has chosen."""
    core = engine.engine_core.engine_core
    chosen = {"scheduler": type(core.scheduler).__name__, "batches": core.batch_queue_size}
    with suppress(AttributeError):
        chosen["defers"] = core.scheduler.defer_block_free
    return chosen | dict(counts)
