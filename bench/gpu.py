"""The GPU tests and benchmarks, from the source tree: ``python bench/gpu.py [slice …]``.

Each slice is a process with a time limit and writes its record while it runs; a failed slice does not stop the others.
Without arguments all slices run, the tests first. A name such as ``ttft`` selects all slices that start with it. A
slice with a complete record is not run again, and an interrupted one is continued. ``--list`` shows the slices.
Records go to bench/records, or to ``--out``. ``--quick`` runs the same programs on the CPU with a tiny model, in a
minute. ``--simulated`` runs the first slices with a tiny model on a simulated CUDA device.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

TOP = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TOP), str(TOP / "src")]  # not this folder: bench/vllm.py would hide vLLM

from bench.parts.gpu_slices import LIMIT_S, QUICK, SIMULATED, SIMULATOR, SLICES, Rates, Slice  # noqa: E402

NEEDED = ("torch", "transformers", "numpy", "xxhash", "click", "rich")
WANTED = ("matplotlib",)
END_S = 20.0
"""A stopped slice has this long to end."""
FOLDER = "kvtier-gpu-"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Options:
    """How slices run."""

    out: Path
    limit_s: float
    again: bool
    is_dry: bool
    """Whether tests that are skipped for lack of a GPU are no failure."""


def main() -> int:
    """Run the chosen slices. Return 0 if all succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slices", nargs="*", metavar="SLICE", help=f"of {', '.join(SLICES)}; quick: {', '.join(QUICK)}")
    parser.add_argument("--quick", action="store_true", help="on the CPU with a tiny model; records to bench/quick-out")
    parser.add_argument("--list", action="store_true", help="show what each slice measures, its time and its record")
    parser.add_argument("--again", action="store_true", help="remove the slices' records first")
    parser.add_argument("--out", type=Path, help="where records and pictures go [bench/records]")
    parser.add_argument("--seconds", type=int, default=LIMIT_S, help="limit of one slice [%(default)s]")
    parser.add_argument(
        "--within", type=float, help="seconds for all of them; one that this stops is continued next time"
    )
    parser.add_argument("--gpu", default=Rates.gpu, help="the estimates' GPU, from kvtier's catalogue [%(default)s]")
    parser.add_argument("--simulated", action="store_true", help="on a simulated CUDA device; records as for --quick")
    given = parser.parse_args()
    slices = SIMULATED if given.simulated else QUICK if given.quick else SLICES
    chosen = [
        it for it in slices if not given.slices or any(it == name or it.startswith(f"{name}-") for name in given.slices)
    ]
    unknown = [name for name in given.slices if not any(it == name or it.startswith(f"{name}-") for it in slices)]
    if unknown:
        parser.error(f"no slice {', '.join(unknown)}; there are {', '.join(slices)}")
    out: Path = given.out or TOP / "bench" / ("records" if slices is SLICES else "quick-out")
    needed = ("click", "rich", "numpy") if given.list else NEEDED
    lacking = missing(needed)
    if lacking:
        print(f"missing: {', '.join(lacking)}. Install them, or add their folder to PYTHONPATH.", file=sys.stderr)
        return 2
    if given.list:
        show({name: slices[name] for name in chosen}, out, Rates(given.gpu), given.seconds)
        return 0
    for name in missing(WANTED):
        print(f"missing: {name}; its part is left out", file=sys.stderr)
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the current slice ends too
    remove_leftovers(out)
    until_s = time.monotonic() + (given.within or float("inf"))
    outcomes: dict[str, list[str]] = {}
    for name in chosen:
        options = Options(out, min(given.seconds, until_s - time.monotonic()), given.again, slices is not SLICES)
        outcomes.setdefault(run(name, slices[name], options), []).append(name)
    for outcome, names in outcomes.items():
        print(f"{outcome}: {', '.join(names)}")
    return 1 if {"failed", "stopped"} & outcomes.keys() else 0


def missing(names: tuple[str, ...]) -> list[str]:
    """Return the modules that cannot be found."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def record_of(name: str, out: Path) -> Path:
    """Return the path of a slice's record."""
    return out / f"gpu_{name.replace('-', '_')}.json"


def state_of(name: str, the_slice: Slice, out: Path) -> str:
    """Return the state of the slice's record: ``complete``, ``begun``, ``none``, or ``of other options``."""
    path = record_of(name, out)
    if not path.exists():
        return "none"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not found["results"]["is_complete"] or "command" not in found:
            return "begun"
        return "complete" if found["command"] == list(the_slice.program) else "of other options"
    except (OSError, ValueError, KeyError, TypeError):
        return "begun"


def show(slices: dict[str, Slice], out: Path, rates: Rates, limit_s: float) -> None:
    """Print a table of the slices."""
    from kvtier.report.table import Table, print_table  # noqa: PLC0415 - `missing` comes first

    rows = [
        (
            name,
            it.what,
            record_of(name, out).name,
            state_of(name, it, out),
            f"{it.estimate_s(rates):.0f}",
            f"{limit_s:.0f}",
        )
        for name, it in slices.items()
    ]
    total = sum(it.estimate_s(rates) for it in slices.values())
    left = sum(it.estimate_s(rates) for name, it in slices.items() if state_of(name, it, out) != "complete")
    print_table(
        Table(
            ("slice", "measures", "record", "state", "estimate s", "limit s"),
            rows,
            numeric=2,
            note=f"{total:.0f} s in all, {left:.0f} s of it not complete yet. Computed from shapes, half of the "
            f"peak of {rates.gpu}, and the rates that bench/parts/gpu_slices.py states.",
        )
    )


def remove_leftovers(out: Path) -> None:
    """Remove the drafts and temporary folders of killed runs. A slice fills up to 40 GiB."""
    for draft in out.glob(".gpu_*.json.*"):
        draft.unlink(missing_ok=True)
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        process = folder.name.removeprefix(FOLDER).partition("-")[0]
        if process.isdecimal() and not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)


def reason_against(the_slice: Slice) -> str | None:
    """Say why a slice cannot run here. None if it can."""
    lacking = missing((*the_slice.modules, *(("pytest",) if the_slice.is_tests else ())))
    if lacking:
        return f"{', '.join(lacking)} not installed"
    available = available_bytes()
    if the_slice.host_bytes > available:
        return f"it page-locks {the_slice.host_bytes >> 30} GiB of host memory, and {available >> 30} GiB are available"
    if the_slice.under and shutil.which(the_slice.under[0]) is None:
        return f"no program {the_slice.under[0]}"
    return None


def available_bytes() -> int:
    """Return the available host memory, within the limit of a container."""
    from kvtier.config.machine_checks import memory_bytes  # noqa: PLC0415 - `missing` comes first

    facts = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(it.split()[1]) << 10 for it in facts if it.startswith("MemAvailable"))
    return min(available, memory_bytes())


def command_of(name: str, the_slice: Slice, out: Path) -> list[str]:
    """Return the command of one slice, with its output files."""
    command = [*the_slice.under, sys.executable, *the_slice.program]
    if the_slice.is_tests:
        return command
    command += ["--record", str(record_of(name, out)), "--resume"]
    if {"bench/ttft.py", "bench/multiturn.py"} & set(the_slice.program) and not missing(("matplotlib",)):
        command += ["--picture", str(record_of(name, out).with_suffix(".svg"))]
    return command


def run(name: str, the_slice: Slice, options: Options) -> str:
    """Run one slice. Return ``succeeded``, ``failed``, ``stopped``, ``complete before`` or ``left out``."""
    record = record_of(name, options.out)
    if options.again:
        record.unlink(missing_ok=True)
    if state_of(name, the_slice, options.out) == "complete":
        print(f"== {name}: its record is complete; --again repeats it", flush=True)
        return "complete before"
    reason = reason_against(the_slice)
    if reason is not None:
        print(f"== {name}: left out, {reason}", flush=True)
        return "left out"
    if options.limit_s <= 0:
        print(f"== {name}: no time left", flush=True)
        return "stopped"
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-") as folder:
        report = Path(folder) / "report.xml"
        command = command_of(name, the_slice, options.out)
        command += ["--junit-xml", str(report)] if the_slice.is_tests else []
        command += ["--dir", folder] if the_slice.program[0] == "bench/vllm.py" else []
        print(f"== {name}: {' '.join(command)}", flush=True)
        began = time.monotonic()
        # A stopped slice leaves its files below `folder`.
        code = end_of(command, environment_of(the_slice) | {"TMPDIR": folder}, options.limit_s)
        ended = f"ended with {code}" if code is not None else "stopped; the record has the results so far,"
        print(f"== {name}: {ended} after {time.monotonic() - began:.0f} s", flush=True)
        if the_slice.is_tests:
            return keep_tests(name, the_slice, record, report, code, is_dry=options.is_dry)
        if code is None:
            return "stopped"
    if code:
        return "failed"
    found = json.loads(record.read_text(encoding="utf-8"))
    write(record, found | {"command": list(the_slice.program)})
    return "succeeded"


def environment_of(the_slice: Slice) -> dict[str, str]:
    """Return the environment of a slice's process."""
    found = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TOP / "src"), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if the_slice.under:  # every tensor is an allocation of its own, so that an access beyond it is detected
        found["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    elif not the_slice.modules:  # vLLM's connectors refuse it
        found["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if {"cpu", "--quick", *SIMULATOR} & set(the_slice.program):
        found["OMP_NUM_THREADS"] = "1"  # more threads contend on a busy machine
    return found


def end_of(command: list[str], environment: dict[str, str], limit_s: float) -> int | None:
    """Return the exit code of a command. None if it was stopped, with all processes of its group."""
    with subprocess.Popen(
        command,
        cwd=TOP,
        env=environment,
        start_new_session=True,
        preexec_fn=_follow,  # noqa: PLW1509 - this process has no threads
    ) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGINT)  # pytest writes its report, the others release the device
                try:
                    process.wait(END_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


def _follow() -> None:
    """End with the process that started this one, even if that is killed. A shell's background jobs ignore SIGINT."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def keep_tests(name: str, the_slice: Slice, record: Path, report: Path, code: int | None, *, is_dry: bool) -> str:
    """Write the record of a run of tests. It is complete if tests passed, and none failed or was skipped."""
    from kvtier.tools.run_record import make_record  # noqa: PLC0415 - `missing` comes first

    cases = list(ET.parse(report).iter("testcase")) if report.exists() else []  # noqa: S314 - pytest's own
    cases = [it for it in cases if it.get("name")]  # an unfinished case has no name
    by_kind = {kind: [it for it in cases if it.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    bad = [*by_kind["failure"], *by_kind["error"]]
    passed = len(cases) - len(bad) - len(by_kind["skipped"])
    reasons = sorted({node.get("message", "") for it in by_kind["skipped"] if (node := it.find("skipped")) is not None})
    results: dict[str, Any] = {
        "passed": passed,
        "failed": [f"{it.get('classname')}.{it.get('name')}" for it in bad],
        "skipped": {"tests": len(by_kind["skipped"]), "reasons": reasons},
        "exit_code": code,
        "seconds": round(sum(float(it.get("time", "0")) for it in cases), 1),
        "is_complete": code == 0 and passed == len(cases) > 0,
    }
    print(
        f"== {name}: {passed} passed, {len(bad)} failed, {len(by_kind['skipped'])} skipped {reasons or ''}",
        flush=True,
    )
    made = make_record("gpu tests", settings={}, seed=None, results=results)
    write(record, made | {"command": list(the_slice.program)})
    if results["is_complete"]:
        return "succeeded"
    # Without a GPU most tests are skipped, and the smoke test asks for no more.
    return "stopped" if code is None else "skipped" if code == 0 and is_dry else "failed"


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record."""
    from kvtier.report.output import write_json  # noqa: PLC0415 - `missing` comes first

    write_json("--out", path, record)


if __name__ == "__main__":
    sys.exit(main())
