"""Finds the wheels that a slice of `bench/gpu.py` needs on a machine without a package index, and packs them.

    python bench/pack.py vllm-ttft --installed freeze.txt --transfer 60MiB --transfer-seconds 30 --seconds 1500
    python bench/pack.py vllm-ttft --installed freeze.txt --out pack       # and download them, in parts of a transfer

`freeze.txt` is the other machine's `pip freeze`. uv resolves the slice's requirements against it for that machine's
Python and gives each wheel's size, so the answer needs no download. A slice is refused, with the reason, if it needs
another torch than the installed one, if a wheel for that Python is missing, or if there is too little time. Models
need no transfer, because the slices make them with random weights. Each transfer is a folder with `join.py`, which is
run there with the name of a permanent folder.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from bench.parts.command import run as run_script
from bench.parts.gpu_slices import SLICES

from kvtier.errors import ConfigError
from kvtier.report.table import Table, print_table
from kvtier.tools.options import Bytes

NEEDED = ("torch>=2.11", "transformers>=5.17", "triton>=3.6", "numpy>=1.26", "xxhash>=3.4", "click>=8.1", "rich>=13.7")
"""Packages that every slice needs."""
FIXED = ("torch", "triton")
"""Packages that are replaced only if the caller asks, because the installed ones fit the machine's driver."""
RESOLVE_S = 300.0
DOWNLOAD_S = 3600.0
JOIN = Path(__file__).parent / "parts" / "join.py"
_ADDRESS = re.compile(r"\w+://\S+")
_PART_BYTES = 1 << 20
"""If less than this is left of a transfer, it stays empty instead of taking a part of a wheel."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """One package that the slice needs."""

    name: str
    version: str
    size_bytes: int
    """0 if the index has no wheel of it for that Python."""
    installed: str = ""
    """The version on the machine, if it differs."""


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that the wheels go to."""

    installed: Mapping[str, str]
    """Version by package."""
    python: str
    glibc: int
    """Minor version of glibc on the machine, which is x86_64."""
    transfer_bytes: int
    transfer_s: float
    seconds: float

    def transfers(self, wheels: Iterable[Wheel]) -> int:
        """Return how many transfers the wheels take."""
        return -(-sum(it.size_bytes for it in wheels) // self.transfer_bytes)

    def refusals(self, wheels: Sequence[Wheel], fixed: Collection[str] = FIXED) -> list[str]:
        """Say why the wheels cannot be transferred. Empty if they can. `fixed` packages must not be replaced."""
        found = [
            f"needs {it.name} {it.version}, and {it.installed} is installed"
            for it in wheels
            if it.name in fixed and it.installed
        ]
        found += [f"{it.name} {it.version} has no wheel for Python {self.python}" for it in wheels if not it.size_bytes]
        count = self.transfers(wheels)
        needed_s = count * self.transfer_s
        if needed_s > self.seconds:
            mib = sum(it.size_bytes for it in wheels) / 2**20
            found.append(
                f"{mib:,.0f} MiB are {count} transfers, {needed_s:,.0f} s at {self.transfer_s:g} s each; "
                f"there are {self.seconds:,.0f} s"
            )
        return found


def installed_of(freeze: str) -> dict[str, str]:
    """Return packages and versions of a `pip freeze`, without local parts such as ``+cu130``."""
    lines = (line.partition("#")[0].strip() for line in freeze.splitlines())
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonical(name): version.partition("+")[0] for name, version in pairs}


def canonical(name: str) -> str:
    """Return the name as an index spells it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def resolve(
    requirements: Sequence[str], target: Target, *, overrides: Sequence[str] = (), keeps_installed: bool
) -> list[Wheel]:
    """Return the wheels that are needed beyond what is installed, largest first.

    Args:
        requirements: requirements of the slice.
        target: the machine.
        overrides: requirements that replace those of the packages, if an index lacks a version.
        keeps_installed: keep the installed packages as they are. False: allow any.

    Raises:
        ConfigError: there is no solution, or uv is missing.
    """
    with tempfile.TemporaryDirectory(prefix="kvtier-pack-") as folder:
        place = Path(folder)
        lock = place / "pylock.toml"
        pins = [f"{name}=={version}" for name, version in target.installed.items()] if keeps_installed else []
        for file, lines in (("asked.in", requirements), ("pins.txt", pins), ("overrides.txt", overrides)):
            (place / file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        command = [*("uv", "pip", "compile", "--quiet", "--format", "pylock.toml", "--output-file", str(lock))]
        command += [
            "--python-version",
            target.python,
            "--python-platform",
            f"x86_64-manylinux_2_{target.glibc}",
            "--only-binary",
            ":all:",
        ]
        command += ["--constraints", str(place / "pins.txt"), "--overrides", str(place / "overrides.txt")]
        if shutil.which("uv") is None:
            raise ConfigError("no program uv, which finds the wheels; allowed: install the package uv")
        done = subprocess.run(
            [*command, str(place / "asked.in")], capture_output=True, text=True, timeout=RESOLVE_S, check=False
        )
        if done.returncode:
            raise ConfigError(_ADDRESS.sub("…", " ".join(done.stderr.split())))
        return brought(tomllib.loads(lock.read_text(encoding="utf-8")), target.installed)


def brought(lock: Mapping[str, list[dict[str, object]]], installed: Mapping[str, str]) -> list[Wheel]:
    """Return the packages of a lock file that are not installed in that version, largest first.

    If several wheels fit, the largest counts.
    """
    found: list[Wheel] = []
    for package in lock["packages"]:
        name, version = canonical(str(package["name"])), str(package["version"])
        has = installed.get(name, "")
        if has != version.partition("+")[0]:
            wheels: list[dict[str, int]] = package.get("wheels", [])  # pyright: ignore[reportAssignmentType]
            found.append(Wheel(name, version, max((it["size"] for it in wheels), default=0), has))
    return sorted(found, key=lambda it: -it.size_bytes)


def split(wheels: Sequence[Path], out: Path, transfer_bytes: int) -> int:
    """Lay out files as transfers, in folders ``01``, ``02``… of `out`. Return their number.

    If a file is larger than what is left of a transfer, it is cut there and continues in the next one.
    """
    number, left = 1, transfer_bytes
    table: dict[str, dict[str, object]] = {}
    for path in wheels:
        parts: list[dict[str, object]] = []
        with path.open("rb") as file:
            rest = path.stat().st_size
            while rest:
                if left < min(rest, _PART_BYTES):
                    number, left = number + 1, transfer_bytes
                content = file.read(min(rest, left))
                rest, left = rest - len(content), left - len(content)
                part = f"{path.name}.{len(parts):03}"
                parts.append({"transfer": number, "file": part, "sha256": hashlib.sha256(content).hexdigest()})
                (out / f"{number:02}").mkdir(parents=True, exist_ok=True)
                (out / f"{number:02}" / part).write_bytes(content)
        with path.open("rb") as file:
            table[path.name] = {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "parts": parts}
    for each in range(1, number + 1):
        folder = out / f"{each:02}"
        (folder / "pack.json").write_text(json.dumps({"transfer": each, "wheels": table}), encoding="utf-8")
        shutil.copyfile(JOIN, folder / JOIN.name)
    return number


def download(wheels: Sequence[Wheel], target: Target, into: Path) -> list[Path]:
    """Download exactly these wheels.

    Raises:
        ConfigError: pip fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", target.python, "--dest", str(into)]
    for minor in range(target.glibc, 4, -1):
        command += ["--platform", f"manylinux_2_{minor}_x86_64"]
    for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux"):
        command += ["--platform", f"{name}_x86_64"]
    done = subprocess.run(
        [*command, *(f"{it.name}=={it.version}" for it in wheels)],
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_S,
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"pip download: {_ADDRESS.sub('…', ' '.join(done.stderr.split()))}")
    return sorted(into.iterdir())


def _whole(_context: click.Context, _option: click.Parameter, value: str) -> int:
    return int(value)


@click.command()
@click.argument("slices", nargs=-1, required=True, type=click.Choice(list(SLICES)), metavar="SLICE…")
@click.option("--installed", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True,
              help="`pip freeze` of the machine.")  # fmt: skip
@click.option("--python", default="3.12", show_default=True, help="Of the machine.")
@click.option("--glibc", type=click.Choice(["17", "28", "31", "35", "39"]), default="28", show_default=True,
              callback=_whole, help="Of the machine, an x86_64 one: manylinux_2_N.")  # fmt: skip
@click.option(
    "--transfer", "transfer_bytes", type=Bytes(), default="64MiB", show_default=True, help="At most that many."
)
@click.option("--transfer-seconds", "transfer_s", type=click.FloatRange(0), default=30.0, show_default=True)
@click.option("--seconds", type=click.FloatRange(0), default=1500.0, show_default=True, help="For all transfers.")
@click.option("--override", "overrides", multiple=True, help="A requirement that replaces those of the packages.")
@click.option("--also", multiple=True, help="A further requirement, such as lmcache==0.5.6.")
@click.option("--without", multiple=True, help="A package that is not brought, whatever the others ask for.")
@click.option("--replace", multiple=True, help="torch or triton: an installed one that may be hidden by another.")
@click.option("--out", type=click.Path(path_type=Path), help="Download the wheels, and write the transfers there.")
def pack(
    slices: tuple[str, ...],
    installed: Path,
    overrides: tuple[str, ...],
    also: tuple[str, ...],
    without: tuple[str, ...],
    replace: tuple[str, ...],
    out: Path | None,
    **given: object,
) -> None:
    """Which wheels a slice needs on a machine without a package index, and whether they can be brought there."""
    target = Target(installed=installed_of(installed.read_text(encoding="utf-8")), **given)  # pyright: ignore[reportArgumentType]
    asked = list(dict.fromkeys((*NEEDED, *(it for name in slices for it in SLICES[name].wheels), *also)))
    try:
        wheels, reasons = resolve(asked, target, overrides=overrides, keeps_installed=True), []
    except ConfigError as error:
        reasons = [f"not with what is installed: {error}"]  # unless the caller knows better
        try:
            wheels = resolve(asked, target, overrides=overrides, keeps_installed=False)
        except ConfigError as alone:
            raise ConfigError(f"{', '.join(slices)} cannot travel: {reasons[0]}; and without it: {alone}") from alone
    wheels = [it for it in wheels if it.name not in set(map(canonical, without))]
    reasons = ([] if without or replace else reasons) + target.refusals(wheels, fixed=set(FIXED) - set(replace))
    rows = [(it.name, it.version, it.installed or "-", f"{it.size_bytes / 2**20:,.1f}") for it in wheels]
    total = sum(it.size_bytes for it in wheels)
    rows.append((f"{len(wheels)} wheels", "", f"{target.transfers(wheels)} transfers", f"{total / 2**20:,.1f}"))
    print_table(Table(("package", "version", "installed", "MiB"), rows, numeric=1))
    if reasons:
        raise ConfigError(f"{', '.join(slices)} cannot travel: {'; '.join(reasons)}")
    if out is not None and wheels:
        with tempfile.TemporaryDirectory(prefix="kvtier-pack-") as folder:
            count = split(download(wheels, target, Path(folder)), out, target.transfer_bytes)
        click.echo(f"{count} transfers in {out}: carry each, and run its join.py with a folder that stays")


if __name__ == "__main__":
    run_script(pack)
