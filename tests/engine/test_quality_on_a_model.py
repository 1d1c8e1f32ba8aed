"""`kvtier bench quality` with a real model: the order of the codecs, the measures' power and the JSON contract."""

import json

import pytest

from kvtier.cli.main import run
from kvtier.tools.demo.model import PRETRAINED, missing_packages

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_packages()), reason=f"{PRETRAINED} needs the packages {missing_packages()}"),
]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of torch that wait for each other take most of the time of a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_real_model_tells_the_codecs_apart(tmp_path, capsys):
    record = tmp_path / "record.json"
    few = ["--text", "agent", "--tokens", "512", "--positions", "1", "--answers", "8", "--turns", "2"]
    # Exit code 1: a promise about answers needs 400 of them.
    assert run(["bench", "quality", *few, "--reference", "int2", "--record", str(record), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    rows = {row["codec"]: row for row in told["results"]}
    assert {(row["model"], row["text"]) for row in rows.values()} == {(PRETRAINED, "agent 512")}
    k8v4, int4, int2 = (rows[name] for name in ("k8v4", "int4", "int2"))
    assert k8v4["kl"] < int4["kl"] < int2["kl"] / 10
    assert k8v4["ratio"] <= 0.41
    assert int4["ratio"] <= 0.31  # one chunk of two has exact tokens
    assert k8v4["kl"] <= k8v4["noise_kl"] < int2["kl"] / 10
    assert set(k8v4) > {"kl_p99", "top1", "noise_kl"}
    tasks = {row["codec"]: (row["kept"], row["of"]) for row in told["tasks"]}
    assert set(tasks) == {"k8v4", "int4", "bf16 arithmetic", "int2"}
    assert len({of for _, of in tasks.values()}) == 1
    assert tasks["int2"][0] < tasks["k8v4"][0]
    assert [(row["codec"], len(row["kl_by_turn"])) for row in told["turns"]] == [("k8v4", 2), ("int4", 2)]
    assert all(row["kl_once"] > 0 for row in told["turns"])
    (power,) = [gate for gate in told["gates"] if gate["codec"] == "int2"]
    assert power["is_met"]
    assert {gate["what"] for gate in told["gates"] if not gate["is_met"]} >= {"right answers on exact KV"}
    kept = json.loads(record.read_text())
    assert kept["benchmark"] == "quality"
    assert [kept[name] for name in ("results", "tasks", "turns")] == [
        told[name] for name in ("results", "tasks", "turns")
    ]
