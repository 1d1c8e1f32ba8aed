"""The GPU tests and benchmarks, from the source tree: ``python bench/gpu.py [slice …]``.

Each slice is a process with a time limit and writes its record while it runs; a failed slice does not stop the others.
Without arguments all slices run, the tests first. ``--list`` names them. Records go to bench/records, or to ``--out``.
``--quick`` runs the same programs on the CPU with a tiny model, in a minute.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "transformers", "triton", "numpy", "xxhash", "click", "rich")
WANTED = ("pytest", "matplotlib")
SECONDS = 570

TTFT = ("bench/ttft.py",)
TURNS = ("bench/multiturn.py",)
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=", "tests/gpu")
SLICES: dict[str, tuple[str, ...]] = {
    "tests": TESTS,
    "ttft-8b-short": (*TTFT, "--contexts", "1024,2048,4096,8192,16384", "--disk", "24GiB", "--host", "24GiB"),
    "ttft-8b-32k": (*TTFT, "--contexts", "32768", "--disk", "24GiB", "--host", "40GiB"),
    # 5,500 tokens of each user, 0.7 GB, as in LMBenchmark; nine fit on the device, a few more in host memory.
    "turns-8b-4k": (
        *TURNS, "--users", "2,6,12,20", "--rounds", "4", "--history", "4000", "--rate", "0.2", "--kv-budget", "6GiB",
        "--host", "8GiB", "--disk", "24GiB",
    ),
    # 21,000 tokens of each user, 2.8 GB, as Samsung's; six fit on the device, and six in host memory.
    "turns-8b-20k": (
        *TURNS, "--users", "2,4,8,12", "--rounds", "3", "--history", "20000", "--rate", "0.1", "--kv-budget", "17GiB",
        "--host", "18GiB", "--disk", "40GiB",
    ),
    "ttft-8b-64k": (*TTFT, "--contexts", "65536", "--disk", "30GiB", "--host", "48GiB", "--no-decode"),
    "ttft-8b-128k": (*TTFT, "--contexts", "131072", "--disk", "40GiB", "--host", "64GiB", "--no-decode"),
    "ttft-qwen3": (*TTFT, "--shape", "qwen3-8b", "--contexts", "1024,8192,32768", "--disk", "24GiB"),
    "ttft-gpt-oss": (*TTFT, "--shape", "gpt-oss-20b", "--contexts", "1024,8192", "--disk", "16GiB", "--no-decode"),
    "ttft-mla": (*TTFT, "--shape", "deepseek-v2-lite", "--contexts", "1024,8192,32768", "--disk", "24GiB"),
}  # fmt: skip
QUICK: dict[str, tuple[str, ...]] = {
    "ttft": (
        *TTFT, "--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--contexts", "64", "--repeats", "2",
        "--chunk-tokens", "16", "--host", "16MiB", "--disk", "64MiB",
    ),
    "turns": (
        *TURNS, "--quick", "--shape", "tiny", "--users", "1,3", "--rounds", "2", "--system", "32", "--history", "96",
        "--question", "8", "--answer", "4", "--rate", "0", "--kv-budget", "260KiB", "--host", "1MiB",
        "--disk", "16MiB", "--chunk-tokens", "16",
    ),
}  # fmt: skip
"""The same programs on the CPU with a tiny model, as a smoke test."""


def main() -> int:
    """Run the chosen slices; 0 if all succeeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slices", nargs="*", metavar="SLICE", help=f"of {', '.join(SLICES)}; quick: {', '.join(QUICK)}")
    parser.add_argument("--quick", action="store_true", help="on the CPU with a tiny model; records to bench/quick-out")
    parser.add_argument("--list", action="store_true", help="print the slices with their commands")
    parser.add_argument("--out", type=Path, help="where records and pictures go [bench/records]")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="limit of one slice")
    given = parser.parse_args()
    slices = QUICK if given.quick else SLICES
    unknown = [name for name in given.slices if name not in slices]
    if unknown:
        parser.error(f"no slice {', '.join(unknown)}; there are {', '.join(slices)}")
    if given.list:
        for name, command in slices.items():
            print(f"{name:16} python {' '.join(command)}")
        return 0
    lacking = missing(tuple(name for name in NEEDED if name != "triton") if given.quick else NEEDED)
    if lacking:
        print(f"missing: {', '.join(lacking)}. Install them, or add their folder to PYTHONPATH.", file=sys.stderr)
        return 2
    for name in missing(WANTED):
        print(f"missing: {name}; its part is left out", file=sys.stderr)
    out: Path = given.out or TOP / "bench" / ("quick-out" if given.quick else "records")
    out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in given.slices or slices if not run(name, slices[name], out, given.seconds)]
    print(f"failed: {', '.join(failed)}" if failed else "all slices succeeded")
    return 1 if failed else 0


def missing(names: tuple[str, ...]) -> list[str]:
    """Modules that cannot be found."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def command_of(name: str, program: tuple[str, ...], out: Path) -> list[str]:
    """The command of one slice, with its output files."""
    command = [sys.executable, *program]
    if program != TESTS:
        command += ["--record", str(out / f"gpu-{name}.json")]
        command += [] if missing(("matplotlib",)) else ["--picture", str(out / f"gpu-{name}.svg")]
    return command


def run(name: str, program: tuple[str, ...], out: Path, seconds: int) -> bool:
    """Run one slice; True if it succeeded. A stopped slice keeps what it has written."""
    if name == "tests" and missing(("pytest",)):
        print("== tests: left out, no pytest", flush=True)
        return False
    command = command_of(name, program, out)
    print(f"== {name}: {' '.join(command)}", flush=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TOP / "src"), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    if "cpu" in program or "--quick" in program:
        environment["OMP_NUM_THREADS"] = "1"  # more threads contend on a busy machine
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=TOP, env=environment, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        print(f"== {name}: stopped after {seconds} s; its record has the results so far", flush=True)
        return False
    print(f"== {name}: ended with {done.returncode} after {time.monotonic() - began:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
