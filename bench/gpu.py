"""Everything that needs a GPU, from the source tree, without a package index: ``python bench/gpu.py [slice …]``.

Each slice is a process of its own with a time limit, writes its records as it goes, and leaves the others alone when it
fails. Without arguments all run, the tests first. ``--list`` names them, ``--out DIR`` says where the records go.
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

TTFT = ("-m", "kvtier.cli.main", "bench", "ttft")
SLICES: dict[str, tuple[str, ...]] = {
    "tests": ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=", "tests/gpu"),
    "ttft-8b-short": (*TTFT, "--contexts", "1024,2048,4096,8192,16384", "--disk", "24GiB", "--host", "24GiB"),
    "ttft-8b-32k": (*TTFT, "--contexts", "32768", "--disk", "24GiB", "--host", "40GiB"),
    "ttft-8b-64k": (*TTFT, "--contexts", "65536", "--disk", "30GiB", "--host", "48GiB", "--no-decode"),
    "ttft-8b-128k": (*TTFT, "--contexts", "131072", "--disk", "40GiB", "--host", "64GiB", "--no-decode"),
    "ttft-qwen3": (*TTFT, "--shape", "qwen3-8b", "--contexts", "1024,8192,32768", "--disk", "24GiB"),
    "ttft-gpt-oss": (*TTFT, "--shape", "gpt-oss-20b", "--contexts", "1024,8192", "--disk", "16GiB", "--no-decode"),
    "ttft-mla": (*TTFT, "--shape", "deepseek-v2-lite", "--contexts", "1024,8192,32768", "--disk", "24GiB"),
}


def main() -> int:
    """Run the slices that were asked for; 0 when all went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slices", nargs="*", metavar="SLICE", help=f"of {', '.join(SLICES)}")
    parser.add_argument("--list", action="store_true", help="name the slices with their commands, and end")
    parser.add_argument("--out", type=Path, default=TOP / "bench" / "records", help="where records and pictures go")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="limit of one slice")
    given = parser.parse_args()
    unknown = [name for name in given.slices if name not in SLICES]
    if unknown:
        parser.error(f"no slice {', '.join(unknown)}; there are {', '.join(SLICES)}")
    if given.list:
        for name, command in SLICES.items():
            print(f"{name:16} python {' '.join(command)}")
        return 0
    lacking = missing(NEEDED)
    if lacking:
        print(f"missing here: {', '.join(lacking)}. Bring them, or a folder with them on PYTHONPATH.", file=sys.stderr)
        return 2
    for name in missing(WANTED):
        print(f"missing here: {name}; what needs it is left out", file=sys.stderr)
    given.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in given.slices or SLICES if not run(name, given.out, given.seconds)]
    print(f"failed: {', '.join(failed)}" if failed else "all went well")
    return 1 if failed else 0


def missing(names: tuple[str, ...]) -> list[str]:
    """Modules that cannot be found."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def command_of(name: str, out: Path) -> list[str]:
    """The program of one slice."""
    command = [sys.executable, *SLICES[name]]
    if "ttft" in SLICES[name]:
        command += ["--record", str(out / f"gpu-{name}.json")]
        if not missing(("matplotlib",)):
            command += ["--picture", str(out / f"gpu-{name}.svg")]
    return command


def run(name: str, out: Path, seconds: int) -> bool:
    """Run one slice; whether it went well. What it had written when it was stopped stays."""
    if name == "tests" and missing(("pytest",)):
        print("== tests: left out, no pytest", flush=True)
        return False
    command = command_of(name, out)
    print(f"== {name}: {' '.join(command)}", flush=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TOP / "src"), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    began = time.monotonic()
    try:
        done = subprocess.run(command, cwd=TOP, env=environment, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        print(f"== {name}: stopped after {seconds} s; its record has what was measured until then", flush=True)
        return False
    print(f"== {name}: ended with {done.returncode} after {time.monotonic() - began:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
