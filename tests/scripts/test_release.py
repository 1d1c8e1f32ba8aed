"""The artifacts of a release: the same bytes from the same commit, and what belongs there, by a real build."""

import shutil
import tomllib
import zipfile

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
