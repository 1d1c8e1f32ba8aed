"""Builds the sdist and the wheel of this checkout, and compares what is in them with the tracked files."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvtier import __version__

ROOT = Path(__file__).resolve().parents[2]
NAME = f"kvtier-{__version__}"
FILE_BYTES_MAX, ARTIFACT_BYTES_MAX = 1 << 20, 2 << 20
DEADLINE_S = 600.0
SHARED = {"deploy/grafana/kvtier.json": "grafana.json", "deploy/prometheus/kvtier.rules.yml": "prometheus.rules.yml"}
"""Files for operators, by their names below `share/kvtier` of an environment."""
SOURCES = ("src/", "deploy/grafana/", "deploy/prometheus/")
TOP = {"CHANGELOG.md", "FORMAT.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml", ".gitignore"}
METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


class FailedError(Exception):
    """A command or a check did not end as it must."""


class Artifacts(NamedTuple):
    """What is published."""

    wheel: Path
    sdist: Path


def tracked(root: Path = ROOT) -> list[str]:
    """Files that git knows and that exist."""
    names = run("git", "ls-files", "-z", cwd=root).split("\0")
    return [name for name in names if name and (root / name).is_file()]


def copied(into: Path, mode: int = 0o644) -> Path:
    """The tracked files of this checkout, as they are now, without what else lies in it."""
    for name in tracked():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, into / name)
        (into / name).chmod(mode)
    return into


def built(source: Path, into: Path) -> Artifacts:
    """The sdist, and the wheel that is built from it. All times in them are those of the commit."""
    epoch = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), str(source))
    run(*command, cwd=into.parent, SOURCE_DATE_EPOCH=epoch)
    return Artifacts(into / f"{NAME}-py3-none-any.whl", into / f"{NAME}.tar.gz")


def members(artifact: Path) -> dict[str, bytes]:
    """The files in a wheel or an sdist."""
    if artifact.suffix == ".whl":
        with zipfile.ZipFile(artifact) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(artifact) as sdist:
        return {it.name: file.read() for it in sdist if (file := sdist.extractfile(it)) is not None}


def differences(first: Artifacts, second: Artifacts) -> list[str]:
    """Files of which the two builds differ; the artifact's name where only times, modes or order do."""
    found = []
    for one, other in zip(first, second, strict=True):
        if one.read_bytes() != other.read_bytes():
            left, right = members(one), members(other)
            changed = [name for name in sorted(left | right) if left.get(name) != right.get(name)]
            found += [f"{one.name}: {name}" for name in changed or ["times, modes or order"]]
    return found


def content_problems(artifact: Path, names: Sequence[str]) -> list[str]:
    """What an artifact lacks, has too much, or too large, compared with the tracked files `names`."""
    if artifact.suffix == ".whl":
        wanted = {name.removeprefix("src/") for name in names if name.startswith("src/")}
        wanted |= {f"{NAME}.data/data/share/kvtier/{name}" for name in SHARED.values()}
        wanted |= {f"{NAME}.dist-info/{name}" for name in METADATA}
    else:
        wanted = {f"{NAME}/{name}" for name in names if name.startswith(SOURCES)}
        wanted |= {f"{NAME}/{name}" for name in (*TOP, "PKG-INFO")}
    found = members(artifact)
    problems = [f"{name} is missing" for name in sorted(wanted - found.keys())]
    problems += [f"{name} does not belong there" for name in sorted(found.keys() - wanted)]
    problems += [f"{name} has {len(it):,} bytes" for name, it in found.items() if len(it) > FILE_BYTES_MAX]
    if (size := artifact.stat().st_size) > ARTIFACT_BYTES_MAX:
        problems.append(f"{artifact.name} has {size:,} bytes")
    return problems


def refuse(problems: Sequence[str]) -> None:
    """End a check that found problems."""
    if problems:
        raise FailedError("; ".join(problems[:10]))


def run(*words: str, cwd: Path, codes: Sequence[int] = (0,), **variables: str) -> str:
    """What a command prints; no module of the checkout is found by it.

    Raises:
        FailedError: another exit code than one of `codes`, or no end within the deadline.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            words, cwd=cwd, env=environment | variables, timeout=DEADLINE_S, text=True, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise FailedError(f"{' '.join(words)}: no end within {DEADLINE_S:g} s") from None
    if done.returncode not in codes:
        raise FailedError(f"{' '.join(words)}: exit code {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout
