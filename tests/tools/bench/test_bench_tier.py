"""`kvtier bench tier` keeps its JSON contract, checks the bytes it times and leaves nothing. No figure is tested."""

import json
import time
from dataclasses import replace
from itertools import product

import pytest

from kvtier.cli.main import run
from kvtier.config import tier_list
from kvtier.errors import KvError
from kvtier.testing.tier_contract import frame_of, object_name
from kvtier.tier import registry
from kvtier.tier.directory import kind as directory_kind
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.files.raw_client import RawFiles
from kvtier.tools.bench import data_paths
from kvtier.tools.bench.data_paths import ClientPath, new_names
from kvtier.tools.bench.tier import TierBench

FEW = ["--size", "64KiB", "--in-flight", "1", "--in-flight", "3", "--repeats", "2", "--sample", "256KiB"]
ROW = {"tier", "kind", "op", "chunk_bytes", "in_flight", "path", "gb_per_s", "ms", "ratio", "ratio_span", "samples"}


def bench(tmp_path, kind="directory", **given) -> TierBench:
    few = {"sizes": (65536,), "in_flight": (1,), "repeats": 1, "sample_bytes": 1 << 17}
    return TierBench(**{"settings": tier_list.parse(f"{kind}:{tmp_path / 'kv'}"), **few, **given})


@pytest.mark.parametrize("kind", ["directory", "disk", "shared_directory"])
def test_a_row_for_each_path_op_size_and_number_in_flight(tmp_path, capsys, kind):
    record = tmp_path / "record.json"
    assert run(["bench", "tier", f"top={kind}:{tmp_path / 'kv'}", *FEW, "--record", str(record), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert all(set(row) == ROW and row["tier"] == "top" and row["kind"] == kind for row in rows)
    speeds = [row for row in rows if row["op"] != "lookup"]
    assert [(row["op"], row["in_flight"], row["path"]) for row in speeds] == [
        (op, in_flight, path)
        for in_flight, op, path in product((1, 3), ("store", "load"), ("raw", "tier", "session"))
    ]  # fmt: skip
    assert all(row["gb_per_s"] > 0 and row["ms"] is None and len(row["samples"]) == 2 for row in speeds)
    lookups = [row for row in rows if row["op"] == "lookup"]
    assert {row["path"]: row["in_flight"] for row in lookups} == {"raw": 1, "tier": 23, "session": 512}
    assert all(row["ms"] >= 0 and row["gb_per_s"] is None for row in lookups)
    assert all(row["ratio"] == 1 for row in rows if row["path"] == "raw" and row["op"] != "lookup")
    assert json.loads(record.read_text())["benchmark"] == "tier"
    assert list(tmp_path.iterdir()) == [record], "the store of the settings was not made, and nothing is left"


def test_loads_may_go_through_another_mount(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    seen = {"put": set(), "get": set()}
    for act, real in (("put", RawFiles.put), ("get", RawFiles.get)):

        def note(self, name, buffer, act=act, real=real):
            seen[act].add(self._root.removeprefix(f"{tmp_path}/")[0])
            real(self, name, buffer)

        monkeypatch.setattr(RawFiles, act, note)
    settings = tier_list.parse(f"shared_directory:{tmp_path / 'a' / 'kv'}")
    result = bench(tmp_path, settings=settings, load_at=tmp_path / "b" / "kv").run()
    assert len(result.results) == 9
    assert seen == {"put": {"a"}, "get": {"b"}}
    assert list((tmp_path / "a").iterdir()) == []


def test_in_a_kind_without_temporary_stores_only_its_own_objects_are_removed(tmp_path, monkeypatch):
    kind = replace(directory_kind.KIND, open_trial=None, raw=None)
    monkeypatch.setattr(registry, "by_name", lambda _name, _origin="": kind)
    tier = DirectoryTier(tmp_path / "kv", capacity_bytes=1 << 30)
    tier.write(object_name(1), frame_of(1))
    result = bench(tmp_path).run()
    assert {(row.path, row.ratio) for row in result.results} == {("tier", None), ("session", None)}
    assert [name for name, _ in tier.scan()] == [object_name(1)]
    tier.close()


def test_another_directory_is_no_second_mount(tmp_path, capsys):
    url, other = f"shared_directory:{tmp_path / 'a' / 'kv'}", tmp_path / "b" / "kv"
    for path in ("a", "b"):
        (tmp_path / path).mkdir()
    assert run(["bench", "tier", url, *FEW, "--load-at", str(other)]) == 2
    assert f"--load-at '{other}' is not the directory of tiers.shared_directory" in capsys.readouterr().err


def test_a_tier_that_gives_other_bytes_fails_the_run(tmp_path, monkeypatch):
    real = DirectoryTier.read_many

    def read(self, reads):
        counts = real(self, reads)
        for each in reads:
            each.into[-1] ^= 1
        return counts

    monkeypatch.setattr(DirectoryTier, "read_many", read)
    with pytest.raises(KvError, match=r"the tier read back different bytes from those it stored|restored 0 of"):
        bench(tmp_path).run()
    assert list(tmp_path.iterdir()) == []


def test_a_raw_client_that_fails_is_one_clear_error(tmp_path, monkeypatch, capsys):
    def put(self, name, frame):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RawFiles, "put", put)
    assert run(["bench", "tier", f"directory:{tmp_path / 'kv'}", *FEW]) == 2
    assert capsys.readouterr().err == "kvtier: the raw client of tier 'directory' failed: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


def test_a_client_that_moves_too_few_objects_in_time_gives_no_rate(monkeypatch):
    monkeypatch.setattr(data_paths, "DEADLINE_S", 0.0)
    path = ClientPath(lambda *_: time.sleep(0.01), None, None, "the raw client", 4096, 1)
    with pytest.raises(KvError, match="the raw client moved 1 of 3 objects within 0 s"):
        path.store(new_names(3))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nonsense"], "unknown kind; allowed: directory"),
        (["drawer:/x"], "unknown kind"),
        (["directory:"], "tiers.directory.path (from flag KIND:WHERE): missing"),
        (["directory:/x?size=3"], "tiers.directory.size (from flag KIND:WHERE): directory tiers have no such setting"),
        (["disk:/x", "--size", "1000"], "--size 1000: a size must be a multiple of 4 KiB, and at most 1 GiB"),
    ],
)
def test_what_is_wrong_is_one_clear_error(capsys, arguments, why):
    assert run(["bench", "tier", *arguments]) == 2
    err = capsys.readouterr().err
    assert why in err
    assert err.count("\n") == 1
