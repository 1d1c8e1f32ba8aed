"""A package with a kind of tier, installed in a folder of its own, works in everything that asks the registry."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEADLINE_S = 120

STORE = """
import sys
from dataclasses import replace
from tests.rig import FINGERPRINT, LAYOUT, Engine, config, load_places, loaded, looked_up, places_of, prefix_of, stored
from kvtier.config.loader import load
from kvtier.runtime.open import open_session

given = load(tiers=sys.argv[2:]).config
made = replace(config(None, host_chunks=40), store=given.store, tiers=given.tiers)
kv = open_session(made, LAYOUT, FINGERPRINT, Engine(64, seed=1).copier())
prefix = prefix_of(6, kv.root)
if sys.argv[1] == "store":
    assert stored(kv.session, "a", prefix, places_of(range(6))).dropped == 0
else:
    tokens = looked_up(kv.session, "b", prefix).tokens
    assert tokens == 96, tokens
    done = loaded(kv.session, "b", prefix, tokens, load_places(tokens))
    print(done.tokens, done.sources)
assert kv.session.close().flushed
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder for `sys.path` with the package."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "shelf_tier.py").write_text((ROOT / "src/kvtier/testing/example_tier.py").read_text())
    about = folder / "kvtier_shelf-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-shelf\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[kvtier.tiers]\nshelf = shelf_tier:KIND\n")
    return folder


def python(site: Path | None, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the package in `site`, or without any."""
    path = [str(ROOT / "src"), str(ROOT), *([] if site is None else [str(site)])]
    kept = {name: text for name, text in os.environ.items() if not name.startswith("KVTIER_")}
    environment = kept | {"PYTHONPATH": os.pathsep.join(path), "KVTIER_HOST__CAPACITY_BYTES": "16MiB"} | variables
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, cwd=ROOT, check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )


def kvtier(site: Path | None, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return python(site, "-m", "kvtier.cli.main", *arguments, **variables)


@pytest.fixture
def filled(site, tmp_path) -> Path:
    """A shelf with six chunks."""
    done = python(site, "-c", STORE, "store", f"shelf:{tmp_path / 'kv'}")
    assert done.returncode == 0, done.stderr
    return tmp_path / "kv"


def test_a_session_stores_and_a_later_one_loads(site, filled):
    done = python(site, "-c", STORE, "load", f"top=shelf:{filled}")
    assert done.stdout == "96 (('top', 96),)\n", done.stderr


def test_the_settings_are_shown_and_checked(site, tmp_path):
    (tmp_path / "kv").write_text("")
    shown = kvtier(
        site, "config", "show", "--json",
        KVTIER_TIERS=f"top=shelf:{tmp_path / 'kv'}", KVTIER_TIERS__TOP__CAPACITY_BYTES="1MiB",
    )  # fmt: skip
    told = json.loads(shown.stdout)["settings"]
    assert told["tiers"]["value"] == [{"name": "top", "kind": "shelf"}]
    assert told["tiers.top.capacity_bytes"]["text"] == "1 MiB"
    assert told["tiers.top.capacity_bytes"]["from"] == "environment KVTIER_TIERS__TOP__CAPACITY_BYTES"
    assert told["tiers.top.read_threads"]["value"] == 2, "a kind's own default"
    found = kvtier(site, "config", "check", "--tier", f"shelf:{tmp_path / 'kv'}")
    assert found.returncode == 1
    assert f"error: tiers.shelf.path = {tmp_path / 'kv'} (from flag --tier): is a file" in found.stdout


def test_it_is_benchmarked_without_a_raw_client(site, tmp_path, filled):
    few = ("--size", "64KiB", "--in-flight", "2", "--repeats", "1", "--sample", "1MiB", "--json")
    before = sorted(filled.rglob("*"))
    done = kvtier(site, "bench", "tier", f"top=shelf:{filled}", *few)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    assert {(row["tier"], row["path"], row["ratio"]) for row in rows} == {
        ("top", path, None) for path in ("tier", "session")
    }
    assert sorted(filled.rglob("*")) == before


def test_it_is_inspected_through_the_opened_tier(site, filled):
    where = f"shelf:{filled}"
    told = json.loads(kvtier(site, "inspect", "stat", where, "--json").stdout)
    assert (told["objects"], told["unreadable"], len(told["models"])) == (12, 0, 1)
    assert told["open_in"] is None
    assert "store" not in kvtier(site, "inspect", "stat", where).stdout, "it has no marker with an id and a version"
    assert "unknown" in kvtier(site, "inspect", "ls", where).stdout
    absent = kvtier(site, "inspect", "stat", f"{where}-absent")
    assert "holds no store of kind shelf" in absent.stderr
    assert not filled.with_name(f"{filled.name}-absent").exists()
    broken = next((filled / "rank-0").glob("*.kv"))
    broken.write_bytes(broken.read_bytes()[:-1] + b"?")
    repaired = kvtier(site, "inspect", "verify", where, "--repair", "--json")
    assert (repaired.returncode, json.loads(repaired.stdout)["dropped"]) == (1, 1), repaired.stderr
    assert kvtier(site, "inspect", "verify", where).returncode == 0
    assert json.loads(kvtier(site, "inspect", "purge", "--yes", where, "--json").stdout)["objects"] == 11
    assert list((filled / "rank-0").glob("*.kv")) == []


def test_the_vllm_commands_know_it(site, tmp_path):
    done = kvtier(site, "vllm", "config", "--tier", f"top=shelf:{tmp_path / 'kv'}?capacity_bytes=1MiB")
    if "is not supported" in done.stderr:
        pytest.skip("another vLLM is installed")
    extra = json.loads(done.stdout)["kv_connector_extra_config"]
    wanted = {"kind": "shelf", "name": "top", "path": str(tmp_path / "kv"), "capacity_bytes": 1 << 20}
    assert extra == {"tiers": [wanted]}
    found = json.loads(kvtier(site, "doctor", "vllm", done.stdout, "--json").stdout)["findings"]
    assert not [it for it in found if it["level"] == "error" and "tiers" in it["about"]], found


def test_a_shared_one_demands_a_secret_and_gets_its_key_id(site, tmp_path):
    where = f"shelf:{tmp_path / 'kv'}?public=true"
    refused = kvtier(site, "config", "check", "--tier", where)
    assert refused.returncode == 2
    assert "store.secret_file (from default): other nodes use tiers.shelf" in refused.stderr
    secret = tmp_path / "secret"
    missing = kvtier(site, "config", "check", "--tier", where, "--set", f"store.secret_file={secret}")
    assert (missing.returncode, "does not exist, and a shared tier needs it" in missing.stdout) == (1, True)
    absent = python(site, "-c", STORE, "store", where, KVTIER_STORE__SECRET_FILE=str(secret))
    assert "does not exist, and a shared tier needs it" in absent.stderr
    assert not secret.exists()
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    for act in ("store", "load"):
        done = python(site, "-c", STORE, act, where, KVTIER_STORE__SECRET_FILE=str(secret))
        assert done.returncode == 0, done.stderr
    told = kvtier(site, "inspect", "stat", where, "--json", KVTIER_STORE__SECRET_FILE=str(secret))
    assert json.loads(told.stdout)["objects"] == 12, told.stderr
    assert "needs its secret" in kvtier(site, "inspect", "stat", where).stderr


def test_a_shared_one_without_temporary_stores_is_probed_in_place_and_left_as_it_was(site, filled, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    module = (site / "shelf_tier.py").read_text()
    assert "    open_trial=" in module
    other = tmp_path / "other"
    (other / "kvtier_shelf-1.0.dist-info").mkdir(parents=True)
    for file in (site / "kvtier_shelf-1.0.dist-info").iterdir():
        (other / file.parent.name / file.name).write_text(file.read_text())
    lines = [line for line in module.splitlines(keepends=True) if not line.startswith("    open_trial=")]
    (other / "shelf_tier.py").write_text("".join(lines))
    few = ("--size", "64KiB", "--depth", "1", "--seconds", "10ms", "--bytes", "1MiB")
    before = sorted(path.name for path in filled.rglob("*"))
    where = f"shelf:{filled}?public=true"
    done = kvtier(other, "probe", "--tier", where, *few, "--json", KVTIER_STORE__SECRET_FILE=str(secret))
    assert done.returncode == 0, done.stderr
    (link,) = [link for link in json.loads(done.stdout)["links"] if link["name"] == "shelf"]
    assert {it["op"] for it in link["measures"]} == {"read", "write"}
    assert sorted(path.name for path in filled.rglob("*")) == before


def test_an_error_that_a_kind_does_not_name_costs_the_tier_and_not_the_engine(site, tmp_path):
    (tmp_path / "file").write_text("")
    done = python(site, "-c", STORE, "store", f"shelf:{tmp_path / 'file' / 'kv'}", KVTIER_STORE__SECRET="ab" * 32)
    assert "tier 'shelf': cannot be opened: NotADirectoryError" in done.stderr
    assert "kvtier starts without this tier" in done.stderr


def test_without_the_package_the_kind_is_unknown_and_named(tmp_path):
    for command in (("config", "check", "--tier"), ("probe", "--tier"), ("inspect", "stat")):
        done = kvtier(None, *command, f"shelf:{tmp_path}")
        assert done.returncode == 2
        assert "tier kind 'shelf' (from " in done.stderr
        assert "unknown kind" in done.stderr
        assert "directory, disk" in done.stderr


@pytest.mark.parametrize(
    ("entry", "source", "why"),
    [
        ("shelf_tier:NONE", None, "cannot be loaded: AttributeError"),
        ("shelf_tier:KIND", "raise RuntimeError('boom')", "cannot be loaded: RuntimeError: boom"),
        ("shelf_tier:Shelf", None, "is not usable: it is a class, not a TierKind"),
        (
            "shelf_tier:KIND",
            ('other_default(TierSettings, "read_threads", 2)', "2"),
            "is not usable: its settings replace",
        ),
        ("shelf_tier:KIND", ('where="path"', 'where="url"'), "is not usable: its settings have no 'url'"),
        ("shelf_tier:KIND", ('name="shelf"', 'name="self"'), "is not usable: its names are"),
    ],
)
def test_a_broken_package_is_named_and_harms_no_other_kind(site, tmp_path, entry, source, why):
    folder = tmp_path / "site"
    folder.mkdir()
    for file in site.rglob("*"):
        if file.is_file() and file.suffix != ".pyc":
            there = folder / file.relative_to(site)
            there.parent.mkdir(exist_ok=True)
            there.write_text(file.read_text())
    module = folder / "shelf_tier.py"
    if source is not None:
        module.write_text(source if isinstance(source, str) else module.read_text().replace(*source))
    (folder / "kvtier_shelf-1.0.dist-info" / "entry_points.txt").write_text(f"[kvtier.tiers]\nshelf = {entry}\n")
    done = kvtier(folder, "config", "show", "--tier", "shelf:/x")
    assert done.returncode == 2
    assert f"of the package kvtier-shelf ({entry}) (from flag --tier): {why}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert kvtier(folder, "config", "show", "--tier", f"disk:{tmp_path / 'kv'}").returncode == 0
