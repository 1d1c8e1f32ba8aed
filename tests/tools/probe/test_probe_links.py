"""A probe's record is believed where it says something, and refused with a reason where it is none."""

import json

import pytest

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.tools.plan.hardware import Speed, fastest, read_links
from kvtier.tools.plan.read_inputs import load


def measure(op, size, depth, rate, latency_us):
    return {
        "op": op,
        "bytes": size,
        "depth": depth,
        "gb_per_s": rate,
        "latency_us_p50": latency_us,
        "latency_us_p99": 2 * latency_us,
    }


RECORD = {
    "links": [
        {"name": "host", "measures": [measure("copy", 1 << 20, 1, 8.0, 100), measure("copy", 1 << 20, 4, 20.0, 200)]},
        {"name": "directory", "measures": [measure("read", 1 << 20, 4, 1.0, 4000)]},
        {
            "name": "disk",
            "measures": [measure("read", 4 << 20, 4, 6.5, 2500), measure("write", 4 << 20, 4, 3.25, 5000)],
        },
    ],
    "warnings": [],
}


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "probe.json"
    path.write_text(json.dumps({"benchmark": "probe", "results": RECORD}))
    return path


def test_links_are_read_from_a_record_and_from_plain_json(record, tmp_path):
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(RECORD))
    links = read_links(record, "--probe")
    assert links == read_links(plain, "--probe")
    assert links["disk"][0] == Speed("read", 4 << 20, 4, 6.5e9, 2.5e-3)
    assert fastest(links, "host", "copy") == 20e9
    assert fastest(links, "host", "read") is None
    assert fastest(links, "gpu", "to_gpu") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"links": 3}',
        '{"links": [{"name": "x"}]}',
        json.dumps({"links": [{"name": "x", "measures": [measure("read", 1, 1, 0.0, 1)]}]}),
        json.dumps({"links": [{"name": "x", "measures": [measure("read", 1, 1, 1.0, float("nan"))]}]}),
        json.dumps({"links": [{"name": "x", "measures": [measure("read", 1, 1, "fast", 1)]}]}),
        "[" * 100_000,
    ],
)
def test_what_is_no_record_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--probe = .*not a probe record"):
        read_links(path, "--probe")


def test_a_missing_file_is_an_error_that_names_it(tmp_path, capsys):
    assert run(["plan", "llama-3.1-8b", "--probe", str(tmp_path / "none")]) == 2
    assert "--probe = " in capsys.readouterr().err


def test_a_plan_takes_measured_links_and_says_so(record):
    inputs = load(options={"model.name": "llama-3.1-8b"}, probe=record)
    assert (inputs.host.channel_bytes_per_s, inputs.host.channels, inputs.host.share) == (20e9, 1, 1.0)
    assert (inputs.disk.read_bytes_per_s, inputs.disk.write_bytes_per_s) == (6.5e9, 3.25e9)
    assert inputs.origin("disk.read_bytes_per_s") == f"probe {record}"
    # No GPU was measured, so its link is still the catalogue's.
    assert inputs.gpu.link_bytes_per_s == 0.0
    assert inputs.software.link_share == 0.8


def test_a_flag_wins_over_the_probe_and_without_one_nothing_changes(record):
    inputs = load(probe=record, sets=["disk.read_bytes_per_s=1 GB/s"])
    assert inputs.disk.read_bytes_per_s == 1e9
    assert load().disk.read_bytes_per_s == 0.0


def test_without_a_disk_the_directory_is_the_drive(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"links": RECORD["links"][:2]}))
    inputs = load(probe=path)
    assert (inputs.disk.read_bytes_per_s, inputs.disk.write_bytes_per_s) == (1e9, 0.0)
