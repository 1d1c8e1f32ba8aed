"""Tensors of a simulated device: their memory is the host's, and what computes on them is queued.

A tensor has `device.type == "cuda"`. Views are made at once, and so is the memory of results, which holds poison until
the operation runs. An operation that returns a number, or whose shapes depend on numbers, blocks the host as on a GPU.

Copies follow the driver: to or from page-locked memory they are asynchronous. From pageable memory they return when the
source was read, and to pageable memory when they are complete.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Self

import torch
from tests.simulated_cuda.machine import Machine, Memory, Op
from torch.cuda._sanitizer import zip_arguments

aten: Any = torch.ops.aten

DEVICE = torch.device("cuda", 0)

RUNS_MAX = 4096
"""A view of more pieces counts as everything between its ends."""


class Current:
    """The machine that all tensors are on."""

    machine: Machine


class Storage:
    """What `untyped_storage` of such a tensor returns: enough to make other views of it."""

    def __init__(self, tensor: "SimulatedTensor") -> None:
        self.memory = tensor.memory
        self.near = tensor.near.untyped_storage()
        self.device = DEVICE

    def data_ptr(self) -> int:
        return self.near.data_ptr()

    def nbytes(self) -> int:
        return self.near.nbytes()

    size = __len__ = nbytes


class SimulatedTensor(torch.Tensor):
    """A view of memory on the device."""

    near: torch.Tensor
    """The same view of the host memory behind it. What is queued may not have run on it."""
    memory: Memory

    @staticmethod
    def __new__(cls, near: torch.Tensor, memory: Memory) -> Self:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=DEVICE,
        )
        made.near, made.memory = near, memory
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        return _dispatched(func, args, kwargs)

    # ---- what C++ does with real storage

    def data_ptr(self) -> int:
        return self.near.data_ptr()

    def untyped_storage(self) -> Any:
        return Storage(self)

    def set_(self, source: Any, offset: int = 0, size: Sequence[int] = (), stride: Sequence[int] = ()) -> Any:
        held = torch.empty(0, dtype=self.dtype)
        near = held.set_(source.near, offset, size, stride) if size else held.set_(source.near)
        return SimulatedTensor(near, source.memory)

    def record_stream(self, stream: Any) -> None:
        self.memory.used_on.add(stream.number)

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.cpu().numpy()
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, **_: Any) -> str:
        return f"SimulatedTensor({list(self.shape)}, {self.dtype})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else repr(self)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def is_pinned(self, device: Any = None) -> bool:
        return False


def allocated(shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> SimulatedTensor:
    """A tensor in new memory, allocated on the current stream."""
    machine = Current.machine
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    count = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    memory = Memory(machine, count * dtype.itemsize, machine.stream)
    near = torch.empty(0, dtype=dtype).set_(memory.near.untyped_storage(), 0, tuple(shape), tuple(stride))
    return SimulatedTensor(near, memory)


# ---- parts of memory ---------------------------------------------------------------------------------------------


@cache
def _pieces(offset: int, shape: tuple[int, ...], stride: tuple[int, ...], item: int, part_bytes: int) -> frozenset[int]:
    """The parts of its memory that a view covers."""
    if 0 in shape:
        return frozenset()
    dims = sorted((step * item, n) for step, n in zip(stride, shape, strict=True) if n > 1 and step)
    run = item
    while dims and dims[0][0] <= run:
        step, n = dims.pop(0)
        run += step * (n - 1)
    starts, runs = [offset * item], 1
    for _, n in dims:
        runs *= n
    if runs > RUNS_MAX:
        run += sum(step * (n - 1) for step, n in dims)
        dims = []
    for step, n in dims:
        starts = [start + number * step for start in starts for number in range(n)]
    found: set[int] = set()
    for start in starts:
        found.update(range(start // part_bytes, (start + run - 1) // part_bytes + 1))
    return frozenset(found)


def parts(near: torch.Tensor, memory: Memory) -> set[int]:
    """The keys of the parts that a view covers."""
    view = near.storage_offset(), tuple(near.shape), near.stride(), near.element_size(), memory.machine.part_bytes
    return {memory.number << 40 | part for part in _pieces(*view)}


def _all_parts(tensors: Iterable[Any]) -> set[int]:
    return {part for it in tensors if isinstance(it, SimulatedTensor) for part in parts(it.near, it.memory)}


def _chosen(tensor: SimulatedTensor, dim: int, index: Any) -> set[int]:
    """The parts of the rows that an index names; all of them if nobody knows the index yet."""
    if isinstance(index, SimulatedTensor) and (index.memory.written is None or index.memory.written.is_over):
        rows: list[int] = index.near.tolist()
        if all(0 <= row < tensor.shape[dim] for row in rows):
            return {part for row in set(rows) for part in parts(tensor.near.select(dim, row), tensor.memory)}
    return parts(tensor.near, tensor.memory)


# ---- operations --------------------------------------------------------------------------------------------------


def _mapped(act: Callable[[Any], Any], value: Any) -> Any:
    """The same lists and tuples, of what `act` makes from their items."""
    if isinstance(value, dict):
        return {name: _mapped(act, it) for name, it in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([_mapped(act, it) for it in value])
    return act(value)


def _items(value: Any) -> Iterator[Any]:
    """All items of lists in lists."""
    if isinstance(value, list | tuple):
        for it in value:
            yield from _items(it)
    else:
        yield value


@cache
def _kind(func: Any) -> tuple[bool, bool]:
    """Tells whether an operation makes a view, and whether it returns something other than tensors."""
    returns = func._schema.returns
    is_view = any(it.alias_info is not None and not it.alias_info.is_write for it in returns)
    return is_view, any("Tensor" not in str(it.type) for it in returns)


def _near(value: Any) -> Any:
    return value.near if isinstance(value, SimulatedTensor) else value


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _kept(value: Any) -> Any:
    """A value as it is now: the host may change its own tensors after the call."""
    return value.clone() if type(value) is torch.Tensor else _near(value)


def _launch(func: Any, run: Callable[[], object], reads: set[int], writes: set[int], written: Iterable[Any]) -> Op:
    op = Current.machine.launch(str(func), run, reads, writes)
    for it in written:
        it.memory.written = op
    return op


def _dispatched(func: Any, args: Any, kwargs: Any) -> Any:
    is_view, is_number = _kind(func)
    if is_view:
        owner = next(it for it in _items((args, *kwargs.values())) if isinstance(it, SimulatedTensor))
        made = func(*_mapped(_near, args), **_mapped(_near, kwargs))
        return _mapped(lambda it: SimulatedTensor(it, owner.memory) if isinstance(it, torch.Tensor) else it, made)
    written = [
        value
        for argument, value in zip_arguments(func._schema, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    reads = _all_parts(_items((args, *kwargs.values())))
    if written:
        return _written(func, args, kwargs, written, reads)
    on_host = {**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs
    if not is_number:
        made = _made(func, args, kwargs)
        if made is not None:
            return _queued(func, args, on_host, made, reads)
    return _blocking(func, args, on_host, reads)


def _made(func: Any, args: Any, kwargs: Any) -> Any:
    """The shapes of an operation's results; None if they depend on numbers. A model asks for the same ones often."""
    key = func, _signature(args), _signature(tuple(kwargs.items()))
    if key not in _MADE:
        on_meta = {**kwargs, "device": "meta"} if kwargs.get("device") is not None else kwargs
        try:
            _MADE[key] = func(*_mapped(_meta, args), **_mapped(_meta, on_meta))
        except (RuntimeError, NotImplementedError):
            _MADE[key] = None
    return _MADE[key]


_MADE: dict[Any, Any] = {}


def _signature(value: Any) -> Any:
    """What the shapes of results depend on."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return (type(value), *map(_signature, value)) if isinstance(value, list | tuple) else (type(value), value)


def _written(func: Any, args: Any, kwargs: Any, written: list[Any], reads: set[int]) -> Any:
    """Queue an operation that writes to its arguments."""
    writes = _all_parts(written)
    if func in (aten.index_select.out, aten.index_copy_.default):
        chosen = _chosen(args[0], args[1], args[2])
        own = parts(args[0].near, args[0].memory)
        if func is aten.index_select.out:
            reads = (reads - own) | chosen
        else:
            reads, writes = reads - own, chosen
    kept = _mapped(_kept, args), {name: _near(it) for name, it in kwargs.items()}
    _launch(func, lambda: func(*kept[0], **kept[1]), reads, writes, written)
    results = written[: len(func._schema.returns)]
    return results[0] if len(results) == 1 else tuple(results) or None


def _queued(func: Any, args: Any, kwargs: Any, made: Any, reads: set[int]) -> Any:
    """Queue an operation with new results, of the shapes in `made`."""
    results = _mapped(
        lambda it: allocated(it.shape, it.stride(), it.dtype) if isinstance(it, torch.Tensor) else it, made
    )
    flat = [it for it in _items(results) if isinstance(it, SimulatedTensor)]
    if func._schema.name in _BLANK:
        return results
    nears = [it.near for it in flat]
    kept_args, kept_kwargs = _mapped(_kept, args), _mapped(_kept, kwargs)

    def run() -> None:
        found = _items(func(*kept_args, **kept_kwargs))
        for near, it in zip(nears, [it for it in found if isinstance(it, torch.Tensor)], strict=True):
            near.copy_(it)

    if func is aten.index_select.default:
        reads = (reads - parts(args[0].near, args[0].memory)) | _chosen(args[0], args[1], args[2])
    _launch(func, run, reads, _all_parts(flat), flat)
    return results


def _blocking(func: Any, args: Any, kwargs: Any, reads: set[int]) -> Any:
    """Do an operation that the host waits for."""
    machine = Current.machine
    machine.launch(str(func), lambda: None, reads)
    machine.finish_stream(machine.stream)
    found = func(*_mapped(_near, args), **_mapped(_near, kwargs))
    return _mapped(lambda it: _of(it) if isinstance(it, torch.Tensor) else it, found)


def _of(near: torch.Tensor) -> SimulatedTensor:
    made = allocated(near.shape, near.stride(), near.dtype)
    made.near.copy_(near)
    return made


_BLANK = {"aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}


# ---- copies ------------------------------------------------------------------------------------------------------


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(target, SimulatedTensor) and isinstance(source, SimulatedTensor):
        near, from_near = target.near, source.near
        reads, writes = _all_parts([source]), _all_parts([target])
        _launch(aten.copy_.default, lambda: near.copy_(from_near), reads, writes, [target])
    elif isinstance(target, SimulatedTensor):
        _to_device(target, source, non_blocking)
    else:
        assert isinstance(source, SimulatedTensor)
        _to_host(target, source, non_blocking)
    return target


def _to_device(target: SimulatedTensor, source: torch.Tensor, non_blocking: bool) -> None:
    machine, near = Current.machine, target.near
    place = source.data_ptr(), source.nbytes
    is_direct = source.is_contiguous() and source.dtype == target.dtype and source.numel() == target.numel()
    if is_direct and non_blocking and machine.is_pinned(*place):
        span = place[0], sum(place)
        op = machine.launch(
            "copy to the device",
            lambda: near.copy_(source),
            machine.host_parts(*place),
            parts(near, target.memory),
            host_range=span,
        )
    else:
        # The driver stages pageable memory: at once, or when the stream is there.
        if machine.rng.random() < 0.5:
            machine.finish_stream(machine.stream)
        staged = source.clone()
        op = machine.launch("copy to the device", lambda: near.copy_(staged), (), parts(near, target.memory))
    target.memory.written = op
    if not non_blocking:
        machine.finish_stream(machine.stream)


def _to_host(target: torch.Tensor, source: SimulatedTensor, non_blocking: bool) -> None:
    machine, near = Current.machine, source.near
    place = target.data_ptr(), target.nbytes
    is_direct = target.is_contiguous() and source.dtype == target.dtype and source.numel() == target.numel()
    is_async = is_direct and non_blocking and machine.is_pinned(*place)
    span = place[0], sum(place)
    written = machine.host_parts(*place) if is_direct else ()
    machine.launch("copy to the host", lambda: target.copy_(near), parts(near, source.memory), written, host_range=span)
    if not is_async:
        machine.finish_stream(machine.stream)


def _to_copy(source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    device = kwargs.get("device")
    if device is None or torch.device(device).type == "cuda":
        return _dispatched(aten._to_copy.default, (source,), {**kwargs, "device": None, "non_blocking": False})
    dtype, non_blocking = kwargs.get("dtype") or source.dtype, kwargs.get("non_blocking") or False
    if dtype != source.dtype:
        source = source.to(dtype)
    if torch.device(device).type == "meta":
        return _meta(source)
    target = torch.empty_like(_near(source), device="cpu")
    if non_blocking:  # PyTorch takes it from its own page-locked memory
        Current.machine.register(target.data_ptr(), target.nbytes)
    _to_host(target, source, non_blocking)  # type: ignore[arg-type]
    return target


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy_,
    aten._to_copy.default: _to_copy,
    aten.record_stream.default: lambda _tensor, _stream: None,
}


def kernels() -> dict[str, Callable[..., Any]]:
    """What makes tensors of the device from nothing."""

    def empty(size: Sequence[int], dtype: Any = None, **_: Any) -> torch.Tensor:
        return allocated(size, None, dtype or torch.get_default_dtype())

    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, **_: Any) -> torch.Tensor:
        return allocated(size, stride, dtype or torch.get_default_dtype())

    return {"empty.memory_format": empty, "empty_strided": empty_strided}
