"""Unpack the Python of a newer vLLM over the kernels of the one that is installed: `python next_release.py DIRECTORY`.

There is no build of it for CPUs yet. What a connector sees is Python, and an engine of this mixture runs.
"""

import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

VERSION = "0.33.0"
KEPT = {".py", ""}
"""Python, and what tells its version."""
DOWNLOAD_S = 1200


def unpack(target: Path) -> None:
    """Download the wheel, keep its Python in `target`, and link the kernels into it."""
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    installed = Path(found.origin).parent
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*command, f"vllm=={VERSION}"], check=True, timeout=DOWNLOAD_S)
        (wheel,) = Path(folder).glob("*.whl")
        with ZipFile(wheel) as archive:
            archive.extractall(target, [name for name in archive.namelist() if Path(name).suffix in KEPT])
    for kernel in installed.rglob("*.so"):
        place = target / "vllm" / kernel.relative_to(installed)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(kernel)


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve()
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    unpack(where)
