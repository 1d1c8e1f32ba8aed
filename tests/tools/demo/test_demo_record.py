"""The record of a benchmark run: complete, plain, and never naming the host."""

import json
import platform

from tests.programs import program

from kvtier.report.output import write_json
from kvtier.tools import run_record
from kvtier.tools.run_record import RecordedSetting, file_system, make_record


def test_a_record_carries_the_conditions_and_is_plain_json(tmp_path):
    made = make_record(
        "io",
        settings={"size": RecordedSetting(4, "flag")},
        seed=7,
        results={"speed": 1.5},
        samples=[1, 2],
        directory=tmp_path,
    )
    write_json("--record", tmp_path / "io.json", made)
    read = json.loads((tmp_path / "io.json").read_text(encoding="utf-8"))
    assert read == made
    assert read["version"] == run_record.VERSION
    assert read["settings"] == {"size": {"value": 4, "origin": "flag"}}
    assert read["seed"] == 7
    assert read["samples"] == [1, 2]
    assert read["machine"]["cores"] >= 1
    assert read["machine"]["file_system"] not in ("", "unknown")
    assert len(read["machine"]["load_average"]) == 3
    assert isinstance(read["machine"]["drive"], str)
    assert read["software"]["python"].endswith(platform.python_version())
    assert "kvtier" in read["software"]
    assert [it.name for it in tmp_path.iterdir()] == ["io.json"]


def test_a_record_names_no_host():
    assert platform.node() not in json.dumps(make_record("io", settings={}, seed=None, results=None)["machine"]).split(
        '"'
    )


def test_a_record_names_the_gpus_and_their_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gpus" not in run_record.machine()
    smi = program(tmp_path / "nvidia-smi", "#!/bin/sh\necho 'NVIDIA H100, 580.1, 81559 MiB, 700.00 W'\n")
    assert run_record.machine()["gpus"] == ["NVIDIA H100, 580.1, 81559 MiB, 700.00 W"]
    smi.write_text("#!/bin/sh\necho 'no devices'\nexit 6\n")
    assert "gpus" not in run_record.machine()


def test_the_file_system_of_a_directory_that_is_not_there_yet_is_that_of_its_parent(tmp_path):
    assert file_system(tmp_path / "not" / "there") == file_system(tmp_path)
    assert file_system(run_record.Path("/proc")) == "proc"


def test_a_checkout_is_named_by_its_commit():
    told = run_record.commit()
    assert told is None or (len(told["id"]) == 40 and isinstance(told["is_modified"], bool))


def test_a_record_that_is_written_again_is_no_change_of_the_tree(monkeypatch):
    """A record that replaced its earlier self after the first part said that the tree had changes."""
    answers = iter(["1" * 40, "", "1" * 40, " M bench/records/quality_qwen.json"])
    monkeypatch.setattr(run_record, "_git", lambda *_: next(answers))
    commit = run_record.commit.__wrapped__
    assert [commit()["is_modified"], commit()["is_modified"]] == [False, True]  # without the cache
    answers = iter(["1" * 40, "", "1" * 40, " M bench/records/quality_qwen.json"])
    run_record.commit.cache_clear()
    assert [run_record.commit()["is_modified"] for _ in range(2)] == [False, False]
    run_record.commit.cache_clear()
