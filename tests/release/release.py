"""`make release`: the sdist and the wheel of this checkout, checked, installed with each extra and run outside of it.

    python -m tests.release.release [--only EXTRA ...]

It prints one line for each thing that ran, and leaves the artifacts in `dist/` if all of them passed. Nothing is
uploaded. Environments are made in a temporary folder; installs keep to `constraints.txt`.
"""

import argparse
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from importlib.metadata import PathDistribution
from pathlib import Path
from shlex import split
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.release.artifacts import (
    ROOT,
    SHARED,
    Artifacts,
    FailedError,
    built,
    content_problems,
    copied,
    differences,
    refuse,
    run,
    tracked,
)

from kvtier import __version__
from kvtier.cli.main import COMMANDS
from kvtier.tools.bench.serve.generator import INSTALL as AIPERF_INSTALL
from kvtier.tools.demo.model import PRETRAINED_INSTALL

HINT = re.compile(r"pip install (\S+(?: '[^']+')*)")
SECRET = ("--set", "store.secret_file=secret")
PLAIN = ("directory:kv?capacity=1GiB", "disk:kv2?capacity=64MiB&reserve=0")
BASE_COMMANDS = ("config check", "size llama-3.1-8b", "plan --example samsung", "plan llama-3.1-8b")
OTHER_HINTS = {
    PRETRAINED_INSTALL: "constraints.txt",
    AIPERF_INSTALL: "tests/vllm/aiperf.txt",
    "pip install huggingface_hub": "constraints.txt",
}
"""Commands that messages name for packages of no extra, and the versions that tests ran with."""


# ---- Environments outside of the checkout ----------------------------------------------------------------------------


class Environment:
    """An environment in a folder of its own, with what its commands read beside it."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.work = folder / "bin", folder / "work"
        run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent)
        self.work.mkdir()
        shutil.copy(Path(__file__).with_name("round_trip.py"), self.work)
        for name in ("vllm_events.msgpack", "requests.parquet"):
            shutil.copy(ROOT / "tests" / "golden" / "traces" / name, self.work)
        (self.work / "secret").touch(mode=0o600)
        (self.work / "secret").write_bytes(bytes(range(32)))

    def pip(self, *words: str, constraints: str = "constraints.txt") -> str:
        """A command of pip for this environment."""
        command = (sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--disable-pip-version-check")
        return run(*command, *words, cwd=self.work, PIP_CONSTRAINT=str(ROOT / constraints))

    def install(self, what: str) -> None:
        """Install, and check that all packages fit each other."""
        self.pip("install", "--quiet", what)
        self.pip("check")

    def try_install(self, words: Sequence[str], constraints: str = "constraints.txt") -> None:
        """Whether pip finds all packages of a command; nothing is installed."""
        self.pip("install", "--quiet", "--dry-run", *words, constraints=constraints)

    def kvtier(self, *words: str, codes: Sequence[int] = (0,)) -> str:
        """A command of kvtier."""
        return run(str(self.bin / "kvtier"), *words, cwd=self.work, codes=codes)

    def round_trip(self, *words: str) -> None:
        """Store in one process, load in another."""
        for action in ("store", "load"):
            run(str(self.bin / "python"), "round_trip.py", action, *words, cwd=self.work)

    def help(self, commands: Sequence[str]) -> None:
        """The help of each command, which imports it."""
        for command in commands:
            self.kvtier(*command.split(), "--help")

    def doctor(self) -> None:
        """Without an engine it may report problems, but must run."""
        self.kvtier("doctor", codes=(0, 1))

    def check_version(self) -> None:
        """The version of the command is that of the artifacts."""
        if (shown := self.kvtier("--version").strip()) != f"kvtier {__version__}":
            raise FailedError(f"it is {shown!r}")

    def check_shared(self) -> None:
        """The files for operators are those of the checkout."""
        for source, name in SHARED.items():
            if (self.bin.parent / "share" / "kvtier" / name).read_bytes() != (ROOT / source).read_bytes():
                raise FailedError(f"{name} is not {source}")

    def follow_hint(self, name: str, extra: "Extra") -> None:
        """Without its package the command fails and names a command of pip; then that command repairs it."""
        shown = self.kvtier(*extra.command, codes=(1, 2))
        hint = HINT.search(shown)
        if hint is None:
            raise FailedError(f"no command of pip in {shown!r}")
        (metadata,) = self.bin.parent.glob("lib/python*/site-packages/kvtier-*.dist-info")
        marked = re.compile(rf"extra == ['\"]{name}['\"]")
        wanted = {it.partition(";")[0].strip() for it in PathDistribution(metadata).requires or () if marked.search(it)}
        if (named := {word.rstrip(",") for word in split(hint[1])}) != wanted:
            raise FailedError(f"the hint names {sorted(named)}, and the wheel's extra {sorted(wanted)}")
        if name == "transformers":  # large; an environment of its own has it
            self.try_install(sorted(named))
            return
        self.pip("install", "--quiet", *sorted(named))
        self.kvtier(*extra.command)


class Extra(NamedTuple):
    """What needs an extra: a command, and for tiers, codecs and seals a round trip through the tier `where`."""

    command: Sequence[str]
    where: str = ""


def extras(servers: dict[str, str]) -> dict[str, Extra]:
    """All extras, with the addresses of the `servers`."""

    def of_tier(where: str) -> Extra:
        return Extra(("config", "check", "--tier", where, *SECRET), where)

    demo = "demo --model tiny --sessions 1 --requests 2 --new-tokens 4 --report demo.html"
    stores = {name: of_tier(f"{where}&seal=off") for name, where in servers.items()}
    return {
        "zstd": of_tier("directory:kv?capacity=1GiB&codec=zstd"),
        "seal": of_tier("disk:kv?capacity=64MiB&reserve=0&seal=on"),
        "events": Extra(("replay", "describe", "vllm_events.msgpack")),
        "parquet": Extra(("replay", "describe", "requests.parquet")),
        "plots": Extra(("plan", "llama-3.1-8b", "--report", "plan.html")),
        **stores,
        "transformers": Extra(demo.split()),
    }


@contextmanager
def running_servers(folder: Path, wanted: Sequence[str]) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Servers of the `wanted` tiers on loopback: their addresses as tiers, and why others did not start."""
    from tests.cluster import mooncake_store, valkey_bed
    from tests.shared.ceph import NotInstalledError
    from tests.small_s3 import SmallS3

    places, missing = {"s3": "", "valkey": "", "mooncake": ""}, {}
    with ExitStack() as stack:
        if "s3" in wanted:
            keys = "region=us-east-1&access_key_id=id&secret_access_key=key"
            places["s3"] = f"s3:bucket/kv?endpoint={stack.enter_context(SmallS3()).endpoint}&allow_http=true&{keys}"
        if "valkey" in wanted:
            try:
                server = valkey_bed.Server(folder, valkey_bed.install())
                stack.callback(server.kill)
                server.restart()
                places["valkey"] = f"valkey:127.0.0.1:{server.port}?prefix=release"
            except NotInstalledError as error:
                missing["valkey"] = str(error)
        if "mooncake" in wanted:
            store = mooncake_store.MooncakeStore(folder, nodes=1)
            for process in (store.master, *store.nodes):
                stack.callback(process.kill)
            store.start()
            places["mooncake"] = f"mooncake:127.0.0.1:{store.port}?prefix=release"
        yield places, missing


# ---- What runs -------------------------------------------------------------------------------------------------------


class Release:
    """Runs the steps, and prints a line for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed = self.left_out = 0

    def say(self, where: str, what: str, took_s: float, result: str) -> None:
        """Print a line of the table."""
        print(f"{where:<13} {what[:75]:<75} {took_s:6.1f} s  {result}", flush=True)

    def step(self, where: str, what: str, act: Callable[..., object], *given: object) -> bool:
        """Run `act(*given)`; whether it passed."""
        began, result = time.monotonic(), "passed"
        try:
            act(*given)
        except (FailedError, OSError) as error:
            self.failed += 1
            result = f"FAILED: {error}"
        self.say(where, what, time.monotonic() - began, result)
        return result == "passed"

    def artifacts(self) -> Artifacts:
        """Build twice and check.

        Raises:
            FailedError: there is nothing to install.
        """
        began, names = time.monotonic(), tracked()
        first = built(copied(self.folder / "source"), self.folder / "out")
        second = built(copied(self.folder / "another" / "folder", 0o600), self.folder / "out2")
        self.say("source", "sdist and wheel, twice", time.monotonic() - began, "passed")
        changed = run("git", "status", "--porcelain", cwd=ROOT).splitlines()
        self.step("source", "the checkout is a commit, without changes", refuse, changed)
        self.step("source", "the same bytes from two folders, of other modes", refuse, differences(first, second))
        for it in first:
            what = f"contents of {it.name}, {it.stat().st_size:,} bytes"
            self.step("source", what, refuse, content_problems(it, names))
        self.step("source", "twine check --strict", checked, first, self.folder)
        return first

    def base(self, wheel: Path, known: dict[str, Extra]) -> None:
        """Without extras: commands, package data, and hints, whose commands are run."""
        here, where = Environment(self.folder / "base"), "no extra"
        if not self.step(where, "pip install the wheel; pip check", here.install, str(wheel)):
            return
        self.step(where, f"kvtier --version is {__version__}", here.check_version)
        self.step(where, f"--help of kvtier and its {len(COMMANDS)} commands", here.help, ["", *COMMANDS])
        for words in BASE_COMMANDS:
            self.step(where, f"kvtier {words}", here.kvtier, *words.split())
        self.step(where, "kvtier doctor", here.doctor)
        self.step(where, "dashboard and alert rules in share/kvtier", here.check_shared)
        for tier in PLAIN:
            self.step(where, f"store, new process, load: {tier}", here.round_trip, "tier", tier)
        for name, extra in known.items():
            if name == "valkey":  # only `kvtier bench tier` needs its package
                self.step(where, "store, new process, load: valkey", here.round_trip, "tier", extra.where, SECRET[1])
            else:
                self.step(where, f"the hint to install {name} is right", here.follow_hint, name, extra)
        for command, constraints in OTHER_HINTS.items():
            words = command.partition("pip install ")[2]
            self.step(where, f"pip install --dry-run {words}", here.try_install, split(words), constraints)

    def extra(self, wheel: Path, name: str, extra: Extra) -> None:
        """The wheel with one extra in an empty environment."""
        here = Environment(self.folder / name)
        if not self.step(name, f"pip install the wheel with [{name}]; pip check", here.install, f"{wheel}[{name}]"):
            return
        self.step(name, f"kvtier {' '.join(extra.command)}", here.kvtier, *extra.command)
        if extra.where:
            what = "store, new process, load: the same bytes"
            self.step(name, what, here.round_trip, "tier", extra.where, SECRET[1])
        if name == "transformers":
            self.step(name, "store, new process, restore: equal tokens", here.round_trip, name, "kv")


def checked(artifacts: Artifacts, folder: Path) -> None:
    """What an index checks of the metadata."""
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, artifacts), cwd=folder)


def check_records() -> None:
    """The records in documents are of the code that this release stores and moves bytes with."""
    run(sys.executable, "bench/tables.py", "--shipped", cwd=ROOT)


def publish(artifacts: Artifacts) -> None:
    """Leave the artifacts in `dist/`, alone."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    (ROOT / "dist").mkdir()
    for artifact in artifacts:
        shutil.copy(artifact, ROOT / "dist")
        print(f"{sha256(artifact.read_bytes()).hexdigest()}  dist/{artifact.name}")


def main() -> int:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(extras(dict.fromkeys(("s3", "valkey", "mooncake"), "")))
    parser.add_argument("--only", nargs="*", choices=names, help="these extras alone, and nothing without one")
    only, began = parser.parse_args().only, time.monotonic()
    with TemporaryDirectory(prefix="kvtier-release-") as temporary:
        release = Release(Path(temporary))
        artifacts = release.artifacts()
        with running_servers(Path(temporary), names if only is None else only) as (places, missing):
            known = {name: it for name, it in extras(places).items() if only is None or name in only}
            for name, reason in missing.items():
                release.left_out += 1
                release.say(name, "a server", 0.0, f"NOT RUN: {reason}")
                del known[name]
            if only is None:
                release.step("source", "records are of this transfer path", check_records)
                release.base(artifacts.wheel, known)
            for name, extra in known.items():
                release.extra(artifacts.wheel, name, extra)
        if only is None and not release.failed:
            publish(artifacts)
    print(f"{release.failed} failed, {release.left_out} left out, {time.monotonic() - began:.0f} s")
    return 1 if release.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FailedError as error:
        sys.exit(f"release: {error}")
