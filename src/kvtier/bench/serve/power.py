"""Energy: of a GPU from NVML's counter, else from sampled power; of processor packages from RAPL.

A figure that no sensor gives is None; nothing is estimated.
"""

import shutil
import subprocess
import threading
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

INTERVAL_S = 0.1
"""Between two samples of the power."""
_DEADLINE_S = 5.0
_POWERCAP = Path("/sys/class/powercap")


class Sensor(Protocol):
    """A source of a device's power."""

    name: str

    def joules(self) -> float | None:
        """A counter that only rises; None if the device has none."""
        ...

    def watts(self) -> float | None:
        """The power now; None if the device does not report it."""
        ...

    def utilisation(self) -> float | None:
        """Share of the last sampling period with a kernel running, 0 to 1; None if the device does not report it."""
        ...


class Nvml:
    """NVIDIA's library. Its counter holds the energy since the driver was loaded."""

    def __init__(self, uuid: str, nvml: Any) -> None:  # noqa: ANN401 - an optional module
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self.name = "NVML"

    def joules(self) -> float | None:
        """See `Sensor`."""
        return self._thousandths("nvmlDeviceGetTotalEnergyConsumption")

    def watts(self) -> float | None:
        """See `Sensor`."""
        return self._thousandths("nvmlDeviceGetPowerUsage")

    def utilisation(self) -> float | None:
        """See `Sensor`."""
        try:
            return self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        except self._nvml.NVMLError:
            return None

    def _thousandths(self, function: str) -> float | None:
        try:
            return getattr(self._nvml, function)(self._handle) / 1e3
        except self._nvml.NVMLError:
            return None


class NvidiaSmi:
    """The program, for machines without NVML's Python package. It has no counter and takes about 20 ms a sample."""

    def __init__(self, device: str) -> None:
        self._command = ["nvidia-smi", "-i", device, "--format=csv,noheader,nounits"]
        self.name = "nvidia-smi"

    def joules(self) -> float | None:
        """See `Sensor`."""
        return None

    def watts(self) -> float | None:
        """See `Sensor`."""
        return self._asked("power.draw")

    def utilisation(self) -> float | None:
        """See `Sensor`."""
        found = self._asked("utilization.gpu")
        return None if found is None else found / 100

    def _asked(self, field: str) -> float | None:
        command = [*self._command, f"--query-gpu={field}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
            return float(done.stdout.split()[0])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return None


class Rapl:
    """Energy counters of Intel's and AMD's processor packages, in /sys/class/powercap.

    Args:
        root: folder of the zones.
    """

    def __init__(self, root: Path = _POWERCAP) -> None:
        self._zones = [it for it in sorted(root.glob("*-rapl:*")) if it.name.count(":") == 1]
        self._before = [_number(it / "energy_uj") for it in self._zones]
        self._microjoules = 0

    def joules(self) -> float | None:
        """Energy of all packages since this object was made; None if a counter is missing or not readable.

        A counter starts again at zero beyond its range, in minutes to hours; ask more often.
        """
        now = [_number(it / "energy_uj") for it in self._zones]
        for zone, before, after in zip(self._zones, self._before, now, strict=True):
            if before is None or after is None:
                return None
            span = (_number(zone / "max_energy_range_uj") or 0) if after < before else 0
            self._microjoules += after - before + span
        self._before = now
        return self._microjoules / 1e6 if self._zones else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def first_gpu() -> Sensor | None:
    """A sensor of the machine's first GPU, without torch; None if there is none."""
    if find_spec("pynvml") is not None:
        nvml: Any = import_module("pynvml")
        try:
            nvml.nvmlInit()
            uuid = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(0))
            return Nvml(uuid if isinstance(uuid, str) else uuid.decode(), nvml)
        except nvml.NVMLError:
            pass
    smi = NvidiaSmi("0") if shutil.which("nvidia-smi") else None
    return smi if smi is not None and smi.watts() is not None else None


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
            found = Nvml(uuid, nvml)
            if found.joules() is not None or found.watts() is not None:
                return found, found.name
            reasons.append("NVML reports no power of this device")
        except nvml.NVMLError as error:
            reasons.append(f"NVML: {error}")
    if shutil.which("nvidia-smi"):
        smi = NvidiaSmi(uuid)
        if smi.watts() is not None:
            return smi, smi.name
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
            self._thread.join(2 * _DEADLINE_S)
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
