"""A simulated CUDA device for tests on machines without one.

    with installed():
        machine = begin(seed)
        ...torch.empty(3, device="cuda"), torch.cuda.Stream(), threads...
        machine.finish_all()
        assert not machine.races

`machine` has streams, events and memory, `tensors` what is queued on them, and `installed` puts both behind torch.
It shows races, stale or freed memory, and waits that should not be. It shows no speed, and no arithmetic of kernels.
"""

import ctypes
import unittest
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.simulated_cuda import cuda
from tests.simulated_cuda.machine import Machine, Memory, without_stacks
from tests.simulated_cuda.tensors import DEVICE, Current, SimulatedTensor, kernels
from torch import library as operators
from torch.utils import _device

__all__ = ["Machine", "begin", "installed", "seen_by_host"]

_CUDA, _META = 1, 14
"""Numbers of kinds of devices (`c10/core/DeviceType.h`)."""


def begin(seed: int = 0, **options: Any) -> Machine:
    """A new device, on which all tensors are from now on; see `Machine`."""
    Current.machine = Machine(seed, **options)
    return Current.machine


def seen_by_host(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Tensors of the device over the memory of these, where the host sees what the device has done."""
    memories: dict[int, Memory] = {}
    made: list[Any] = []
    for near in tensors:
        memory = memories.setdefault(near.untyped_storage().data_ptr(), Memory(Current.machine, 0, 0))
        memory.near = near
        made.append(SimulatedTensor(near, memory))
    return made


@contextmanager
def installed() -> Iterator[None]:
    """Put the simulated device behind `torch.cuda` and `device="cuda"`, in all threads of this process.

    A test is skipped where there is a real one.
    """
    if torch.cuda.is_available():
        raise unittest.SkipTest("there is a CUDA device")
    begin()
    ours = operators.Library("aten", "IMPL", "CUDA")
    for name, kernel in kernels().items():
        ours.impl(name, kernel)
    with ExitStack() as undo:
        undo.callback(ours._destroy)
        undo.enter_context(_device_guard())
        undo.enter_context(without_stacks())
        for name, double in cuda.doubles().items():
            undo.enter_context(mock.patch.object(torch.cuda, name, double, create=True))
        for owner, name, double in cuda.with_device(DEVICE):
            undo.enter_context(mock.patch.object(owner, name, double))
        # It keeps the calls that a `with torch.device(...)` gives its device to, doubled ones or not.
        _device._device_constructors.cache_clear()
        undo.callback(_device._device_constructors.cache_clear)
        undo.enter_context(mock.patch.object(ctypes, "CDLL", cuda.open_library(ctypes.CDLL)))
        # `Module.to` would put the device's memory into the host's parameters.
        undo.enter_context(mock.patch.object(torch.__future__, "_overwrite_module_params_on_conversion", new=True))
        yield


@contextmanager
def _device_guard() -> Iterator[None]:
    """Give C++ a guard of CUDA devices that does nothing: that of meta devices. A CPU's build has none."""
    libc10 = ctypes.CDLL(str(Path(torch.__path__[0]) / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(libc10, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[_CUDA] = guards[_CUDA], guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before
