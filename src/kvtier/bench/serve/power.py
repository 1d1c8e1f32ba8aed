"""Energy: of a GPU from NVML's counter or `nvidia-smi`, of processor packages from RAPL.

A figure that no sensor gives is None; nothing is estimated.
"""

import shutil
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DEADLINE_S = 5.0
"""Of one call of nvidia-smi."""
_POWERCAP = Path("/sys/class/powercap")


class Nvml:
    """NVIDIA's library. Its counter holds the energy since the driver was loaded."""

    def __init__(self, handle: Any, nvml: Any) -> None:  # noqa: ANN401 - of an optional module
        self._handle = handle
        self._nvml = nvml

    def joules(self) -> float | None:
        """Joules of a counter that only rises; None if the device has none."""
        found = self._asked("nvmlDeviceGetTotalEnergyConsumption")
        return None if found is None else found / 1e3

    def watts(self) -> float | None:
        """The power now; None if the device does not report it."""
        found = self._asked("nvmlDeviceGetPowerUsage")
        return None if found is None else found / 1e3

    def utilisation(self) -> float | None:
        """Share of the last sampling period with a kernel running, 0 to 1; None if the device does not report it."""
        found = self._asked("nvmlDeviceGetUtilizationRates")
        return None if found is None else found.gpu / 100

    def _asked(self, function: str) -> Any:  # noqa: ANN401 - a number or a structure
        try:
            return getattr(self._nvml, function)(self._handle)
        except self._nvml.NVMLError:
            return None


class NvidiaSmi:
    """The program, for machines without NVML's Python package. It has no counter and takes about 20 ms a sample."""

    def __init__(self, device: str) -> None:
        self._command = ["nvidia-smi", "-i", device, "--format=csv,noheader,nounits"]

    def joules(self) -> float | None:
        """Joules of a counter that only rises; None if the device has none."""
        return None

    def watts(self) -> float | None:
        """The power now; None if the device does not report it."""
        return self._asked("power.draw")

    def utilisation(self) -> float | None:
        """Share of the last sampling period with a kernel running, 0 to 1; None if the device does not report it."""
        found = self._asked("utilization.gpu")
        return None if found is None else found / 100

    def _asked(self, field: str) -> float | None:
        command = [*self._command, f"--query-gpu={field}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
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


Sensor = Nvml | NvidiaSmi


def first_gpu() -> Sensor | None:
    """A sensor of the machine's first GPU, without torch; None if there is none."""
    if find_spec("pynvml") is not None:
        nvml: Any = import_module("pynvml")
        try:
            nvml.nvmlInit()
            return Nvml(nvml.nvmlDeviceGetHandleByIndex(0), nvml)
        except nvml.NVMLError:
            pass
    smi = NvidiaSmi("0") if shutil.which("nvidia-smi") else None
    return smi if smi is not None and smi.watts() is not None else None
