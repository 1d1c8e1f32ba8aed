"""What a GPU draws while something runs: from NVML's energy counter, else from sampled power, else nothing.

A figure that cannot be had is None: no energy is ever estimated from anything but the device's own sensors.
"""

import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Protocol, Self

INTERVAL_S = 0.1
"""Between two samples of the power."""
_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Energy:
    """What was drawn from the beginning to the end of a stretch of time."""

    seconds: float
    joules: float | None
    source: str
    """Where it comes from, or why there is none."""

    @property
    def watts(self) -> float | None:
        """Mean power."""
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds


class Sensor(Protocol):
    """One way to ask a device."""

    name: str

    def joules(self) -> float | None:
        """A counter that only rises; None when the device has none."""
        ...

    def watts(self) -> float | None:
        """What it draws now; None when it does not say."""
        ...


class Nvml:
    """Through NVIDIA's library. Raises its own errors when there is no such device."""

    def __init__(self, uuid: str, nvml: Any = None) -> None:  # noqa: ANN401 - an optional module
        self._nvml = nvml or import_module("pynvml")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        self.name = "NVML"

    def joules(self) -> float | None:
        """See `Sensor`. The device counts millijoules since its driver was loaded."""
        try:
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        except self._nvml.NVMLError:
            return None

    def watts(self) -> float | None:
        """See `Sensor`."""
        try:
            return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        except self._nvml.NVMLError:
            return None


class NvidiaSmi:
    """Through the program, where NVML's Python package is missing. It has no counter, and takes some 20 ms a sample."""

    def __init__(self, uuid: str) -> None:
        self._command = ["nvidia-smi", "-i", uuid, "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
        self.name = "nvidia-smi"

    def joules(self) -> float | None:
        """See `Sensor`."""
        return None

    def watts(self) -> float | None:
        """See `Sensor`."""
        try:
            done = subprocess.run(self._command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
            return float(done.stdout.split()[0])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return None


def find_sensor(device: str) -> tuple[Sensor | None, str]:
    """What can be asked about a torch device, and its name; or None, and why."""
    if not device.startswith("cuda"):
        return None, f"{device} has no power sensor that we read"
    torch: Any = import_module("torch")
    uuid = str(getattr(torch.cuda.get_device_properties(torch.device(device)), "uuid", ""))
    if not uuid:
        return None, "torch does not tell which device it is"
    # The numbers of NVML and of torch differ where CUDA_VISIBLE_DEVICES is set; this name does not.
    uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    told = "neither nvidia-ml-py nor nvidia-smi is installed"
    if find_spec("pynvml") is not None:
        nvml: Any = import_module("pynvml")
        try:
            found = Nvml(uuid, nvml)
        except nvml.NVMLError as error:
            told = f"NVML: {error}"
        else:
            if found.joules() is not None or found.watts() is not None:
                return found, found.name
            told = "NVML tells no power of this device"
    if shutil.which("nvidia-smi"):
        smi = NvidiaSmi(uuid)
        if smi.watts() is not None:
            return smi, smi.name
        told += "; nvidia-smi tells none either"
    return None, told


class Meter:
    """Measures what is drawn inside a ``with`` block; `energy` tells it afterwards.

    Args:
        sensor: who is asked; None: nobody, and there is no figure.
        told: the sensor's name, or why there is none.
    """

    def __init__(self, sensor: Sensor | None, told: str) -> None:
        self._sensor = sensor
        self._told = told
        self._stop = threading.Event()
        self._samples: list[float] = []
        self.sampled = threading.Event()
        """There is a sample."""
        self._thread: threading.Thread | None = None
        self.energy = Energy(0.0, None, told)

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        self._counted = None if self._sensor is None else self._sensor.joules()
        if self._sensor is not None and self._counted is None:
            self._thread = threading.Thread(target=self._sample, name="kvtier bench power", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        counted = None if self._sensor is None else self._sensor.joules()
        seconds = time.perf_counter() - self._began
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * _DEADLINE_S)
        if self._counted is not None and counted is not None:
            self.energy = Energy(seconds, counted - self._counted, f"{self._told}, energy counter")
        elif self._samples:
            # Samples are about evenly spaced; their mean over the whole time is what can honestly be said.
            watts = sum(self._samples) / len(self._samples)
            self.energy = Energy(seconds, watts * seconds, f"{self._told}, {len(self._samples)} samples of the power")
        else:
            self.energy = Energy(seconds, None, self._told)

    def _sample(self) -> None:
        assert self._sensor is not None
        while not self._stop.is_set():
            watts = self._sensor.watts()
            if watts is not None:
                self._samples.append(watts)
                self.sampled.set()
            self._stop.wait(INTERVAL_S)
