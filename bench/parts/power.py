"""The energy of a block of `bench/multiturn.py`, from the sensors of `kvtier.tools.bench.serve.sampler`."""

import shutil
import threading
import time
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

from kvtier.tools.bench.serve.sampler import DEADLINE_S, NvidiaSmi, Nvml, Sensor

INTERVAL_S = 0.1
"""Between two samples of the power."""


def find_sensor(device: str) -> tuple[Sensor | None, str]:
    """The sensor of a torch device and its name; or None and the reason."""
    if not device.startswith("cuda"):
        return None, f"{device} has no supported power sensor"
    torch: Any = import_module("torch")
    uuid = str(getattr(torch.cuda.get_device_properties(torch.device(device)), "uuid", ""))
    # NVML and torch number devices differently if CUDA_VISIBLE_DEVICES is set; the UUID is the same.
    uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    reasons: list[str] = []
    if find_spec("pynvml") is not None:
        nvml: Any = import_module("pynvml")
        try:
            nvml.nvmlInit()
            found = Nvml(nvml.nvmlDeviceGetHandleByUUID(uuid), nvml)
            if found.joules() is not None or found.watts() is not None:
                return found, "NVML"
            reasons.append("NVML reports no power of this device")
        except nvml.NVMLError as error:
            reasons.append(f"NVML: {error}")
    if shutil.which("nvidia-smi"):
        smi = NvidiaSmi(uuid)
        if smi.watts() is not None:
            return smi, "nvidia-smi"
        reasons.append("nvidia-smi reports no power of this device")
    return None, "; ".join(reasons) or "neither nvidia-ml-py nor nvidia-smi is installed"


class PowerMeter:
    """Measures the energy of a ``with`` block: `joules` and `source` afterwards.

    Args:
        sensor: of the device; None: no figure.
        name: the sensor's name, or why there is none.
    """

    def __init__(self, sensor: Sensor | None, name: str) -> None:
        self._sensor = sensor
        self._stop = threading.Event()
        self._samples: list[float] = []
        self.sampled = threading.Event()
        """Set when there is a sample."""
        self.joules: float | None = None
        self.source = name

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        self._counted = None if self._sensor is None else self._sensor.joules()
        self._thread = threading.Thread(target=self._sample, name="kvtier bench power", daemon=True)
        if self._sensor is not None and self._counted is None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        counted = None if self._sensor is None else self._sensor.joules()
        seconds = time.perf_counter() - self._began
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(2 * DEADLINE_S)
        if self._counted is not None and counted is not None:
            self.joules = counted - self._counted
            self.source += ", energy counter"
        elif self._samples:
            # Samples are about evenly spaced, so their mean times the duration is the energy.
            self.joules = sum(self._samples) / len(self._samples) * seconds
            self.source += f", {len(self._samples)} samples of the power"

    def _sample(self) -> None:
        assert self._sensor is not None
        while not self._stop.is_set():
            watts = self._sensor.watts()
            if watts is not None:
                self._samples.append(watts)
                self.sampled.set()
            self._stop.wait(INTERVAL_S)
