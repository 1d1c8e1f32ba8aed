"""Runs a program as the interpreter does, on a simulated device: ``python tests/simulated_cuda/__main__.py PROGRAM``.

It looks for no races, which needs a hundred times as long.
"""

import os
import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.simulated_cuda import begin, installed  # noqa: E402

WHOLE = 1 << 40
"""With parts of so many bytes, accesses are not told apart."""


def main(words: list[str]) -> None:
    """Run ``-m MODULE …`` or ``SCRIPT …``. `SIMULATED_CUDA_SEED` decides the order of execution."""
    with installed():
        machine = begin(int(os.environ.get("SIMULATED_CUDA_SEED", "0")), part_bytes=WHOLE, host_part_bytes=WHOLE)
        try:
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
        finally:
            machine.finish_all()


if __name__ == "__main__":
    main(sys.argv[1:])
