"""The images of `deploy/image/Containerfile`, built from a base that is made here, and run as a cluster runs them.

`mmdebstrap` makes the base of Debian's packages, `podman build` is buildah with chroot isolation, and `runc` runs
containers without a network. Only root with apt-get can install these.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest
from tests.shared.ceph import NotInstalledError, apt_install

TOP = Path(__file__).parents[2]
PROGRAMS = ("mmdebstrap", "podman", "runc")
BASE = "localhost/kvtier-base"
BUILD_DEADLINE_S = 540.0
RUN_DEADLINE_S = 240.0
VLLM = TOP / ".venv-vllm/bin/python"
ENGINE_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""That of `.venv-vllm`, which mounts the folder here."""
# As `bookworm-slim` is made: without manuals and translations.
NOT_IN_BASE = [f"/usr/share/{folder}/*" for folder in ("doc", "info", "locale", "man")]
LIMITS = ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]  # the defaults need CAP_SYS_RESOURCE


def run(*command: str, deadline_s: float = RUN_DEADLINE_S, environment: dict[str, str] | None = None) -> str:
    """The command's standard output; all its output in the error if it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=deadline_s, check=False, env=environment, cwd="/"
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def pip_options(folder: Path) -> list[str]:
    """Options of a build that give it this machine's pip settings, below /mnt, which images have and keep empty.

    Limits of releases (`constraint`) stay out: the build has its own.
    """
    settings: dict[str, str] = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = ast.literal_eval(value)
    settings.pop("constraint", None)
    mounts = {folder: "/mnt"}
    for name, value in settings.items():
        words = []
        for word in value.split():
            place = Path(urlparse(word).path if word.startswith("file://") else word)
            if place.is_absolute() and place.is_file():  # a certificate
                shutil.copy(place.resolve(), folder / place.name)
                words.append(f"/mnt/{place.name}")
            elif place.is_absolute() and place.is_dir():
                mounted = place.parent if word.startswith("file://") else place  # an index leads to files beside it
                (folder / mounted.relative_to("/")).mkdir(parents=True, exist_ok=True)
                mounts[mounted] = f"/mnt{mounted}"
                words.append(word.replace(str(place), f"/mnt{place}"))
            else:
                words.append(word)
        settings[name] = " ".join(words)
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    volumes = [option for host, inside in mounts.items() for option in ("--volume", f"{host}:{inside}:ro")]
    return ["--secret", f"id=pip,src={file}", *volumes]


class Engine:
    """podman with a storage of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._podman = ["podman", "--root", str(folder / "storage"), "--runroot", str(folder / "run"), "--runtime"]
        self._podman += ["runc"]

    def call(self, *arguments: str, deadline_s: float = RUN_DEADLINE_S) -> str:
        """Standard output of one command of podman."""
        return run(*self._podman, *arguments, deadline_s=deadline_s)

    def build(self, target: str) -> str:
        """The name of the image of one stage."""
        name, pip = f"localhost/kvtier:{target}", self.folder / "pip"
        pip.mkdir(exist_ok=True)
        arguments = ["--build-arg", f"BASE={BASE}", "--build-arg", f"ENGINE_PYTHON={ENGINE_PYTHON}"]
        arguments += ["--file", str(TOP / "deploy/image/Containerfile"), "--target", target, "--tag", name]
        self.call(
            "build", "--isolation", "chroot", *arguments, *pip_options(pip), str(TOP), deadline_s=BUILD_DEADLINE_S
        )
        return name

    def run(self, image: str, data: Path, *command: str, options: tuple[str, ...] = ("--read-only",)) -> str:
        """Standard output of a container without network, privileges and places to write but /kv and /tmp."""
        given = ["--rm", "--network", "none", "--cap-drop", "all", "--security-opt", "no-new-privileges", *LIMITS]
        given += ["--read-only-tmpfs=false", "--tmpfs", "/tmp", "--volume", f"{data}:/kv"]
        return self.call("run", *given, *options, image, *command)


@pytest.fixture(scope="session")
def engine(tmp_path_factory) -> Iterator[Engine]:
    if not all(map(shutil.which, PROGRAMS)):
        try:
            apt_install(*PROGRAMS)
        except NotInstalledError as error:
            pytest.skip(f"images cannot be built: {error}")
    if os.geteuid():
        pytest.skip("images are built as root here")
    folder = tmp_path_factory.mktemp("image")
    engine, base = Engine(folder), folder / "base.tar"
    options = [f"--dpkgopt=path-exclude={path}" for path in NOT_IN_BASE]
    try:
        run("mmdebstrap", "--variant=minbase", *options, "bookworm", str(base), deadline_s=BUILD_DEADLINE_S)
        engine.call("import", "--quiet", str(base), BASE)
        yield engine
        print(engine.call("images", "--format", "{{.Tag}} {{.Size}}"))
    finally:
        engine.call("system", "reset", "--force")


@pytest.fixture(scope="session")
def tools(engine) -> str:
    return engine.build("tools")


@pytest.fixture(scope="session")
def demo(engine, tools) -> str:
    return engine.build("demo")


@pytest.fixture
def data(tmp_path) -> Path:
    """A volume for the image's user."""
    folder = tmp_path / "data"
    folder.mkdir()
    os.chown(folder, 10001, 10001)
    return folder


PYTHON = ("--read-only", "--entrypoint", "/opt/kvtier/venv/bin/python")


def test_the_user_is_not_root(engine, tools, data):
    print_user = ("-c", "import os; print(os.getuid())")
    assert engine.run(tools, data, *print_user, options=PYTHON).split() == ["10001"]
    assert engine.run(tools, data, *print_user, options=(*PYTHON, "--user", "0")).split() == ["0"]


WRITE = """
import errno, pathlib, sys
for place in sys.argv[1:]:
    try:
        (pathlib.Path(place) / "x").write_text("x")
        print("written")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def test_nothing_but_the_volumes_can_be_written(engine, tools, data):
    inside, outside = ("/kv", "/tmp"), ("/", "/etc", "/opt/kvtier", "/usr/bin", "/var/tmp")
    write = ("-c", WRITE, *inside, *outside)
    root = ("--user", "0", "--cap-add", "DAC_OVERRIDE")  # no permission stops it
    found = engine.run(tools, data, *write, options=(*PYTHON, *root)).split()
    assert found == ["written"] * len(inside) + ["EROFS"] * len(outside)
    assert engine.run(tools, data, *write, options=(*PYTHON[1:], *root)).split() == ["written"] * len(found)


INSTALLED = """
import importlib.metadata as m, json, sys
print(json.dumps({it.metadata["Name"]: it.version for it in m.distributions(path=sys.argv[1:] or sys.path)}))
"""


def other_versions(installed: dict[str, str]) -> set[str]:
    """What differs from `constraints.txt`, kvtier aside."""
    lines = (TOP / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    found = {name.lower().replace("_", "-"): version.partition("+")[0] for name, version in installed.items()}
    return {name for name, version in found.items() if name != "kvtier" and pinned.get(name) != version}


@pytest.mark.parametrize("path", [(), ("/opt/kvtier/engine",)], ids=["tools", "engine"])
def test_what_is_installed_has_the_tested_versions(path, engine, tools, data):
    installed = json.loads(engine.run(tools, data, "-c", INSTALLED, *path, options=PYTHON))
    assert {"kvtier", "xxhash", "cryptography"} <= set(installed)
    assert ("numpy" in installed) == (not path)  # the engine's own
    assert other_versions(installed) == set()
    assert other_versions(installed | {"xxhash": "1.0", "left-pad": "1.0"}) == {"xxhash", "left-pad"}


DIGESTS = """
import hashlib, json, pathlib, sys
top = pathlib.Path(sys.argv[1])
files = [it for it in top.rglob("*") if it.is_file() and "__pycache__" not in it.parts]
print(json.dumps({str(it.relative_to(top)): hashlib.sha256(it.read_bytes()).hexdigest() for it in files}))
"""


def test_the_package_is_that_of_this_checkout(engine, tools, data):
    here = json.loads(run(sys.executable, "-c", DIGESTS, str(TOP / "src/kvtier")))
    site = f"/opt/kvtier/venv/lib/python{ENGINE_PYTHON}/site-packages/kvtier"
    for place in (site, "/opt/kvtier/engine/kvtier"):
        assert json.loads(engine.run(tools, data, "-c", DIGESTS, place, options=PYTHON)) == here


def test_the_image_keeps_nothing_of_the_builders_pip(engine, tools, data):
    (about,) = json.loads(engine.call("image", "inspect", tools))
    steps = json.dumps([about["Config"], about["History"]])
    assert "useradd" in steps
    assert "PIP_" not in steps
    assert "/mnt" not in steps
    look = "import pathlib; print(*pathlib.Path('/mnt').iterdir(), *pathlib.Path('/etc').glob('pip*'))"
    assert engine.run(tools, data, "-c", look, options=PYTHON).split() == []


def test_the_demo_runs_and_the_tools_read_its_store(engine, demo, tools, data):
    shortest = ("demo", "--sessions", "1", "--requests", "2", "--new-tokens", "4", "--dir", "/kv/store", "--json")
    shown = json.loads(engine.run(demo, data, *shortest))
    assert shown["weights"] == "pretrained"
    assert shown["identical"]
    assert [it["restored_tokens"] > 0 for it in shown["passes"]] == [False, True, True]
    verified = json.loads(engine.run(tools, data, "inspect", "verify", "/kv/store", "--json"))
    assert verified["checked"] > 0
    assert verified["outcomes"] == {"good": verified["checked"]}


IMPORTED = """
import importlib.metadata, json
import cryptography, obstore, xxhash
from kvtier.connect import vllm
points = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvtier")
files = [it.__file__ for it in (vllm, cryptography, obstore, xxhash)]
print(json.dumps([vllm.KvtierConnector.__name__, sorted({it.value for it in points}), files]))
"""


def test_an_engine_imports_the_folder_that_an_init_container_copied(engine, tools, data):
    copy = ("--read-only", "--entrypoint", "cp")
    engine.run(tools, data, "-r", "/opt/kvtier/engine", "/kv/engine", options=copy)
    assert (data / "engine/prefill_decode_proxy.py").is_file()  # of deploy/kubernetes/prefill-decode
    if not VLLM.exists():
        pytest.skip("needs vLLM: make test-vllm makes .venv-vllm")
    where = os.environ | {"PYTHONPATH": str(data / "engine")}
    done = run(str(VLLM), "-c", IMPORTED, environment=where)
    name, points, files = json.loads(done.splitlines()[-1])
    assert (name, points) == ("KvtierConnector", ["kvtier.connect.vllm:register"])
    assert all(Path(file).is_relative_to(data / "engine") for file in files)
