"""Converted traces replay to the same figures, without anything else of their source."""

import gzip
import json
import re

import numpy as np
import pytest
from tests.traces import MAGAGENT, arrays_of, public, replay

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.tools.trace.arrays import write_requests


@pytest.mark.parametrize("name", ["lmcache_magagent_b64", "claude_code_17sessions", "lmcache_miniswe_b64"])
@pytest.mark.parametrize("as_runs", [True, False])
def test_a_round_trip_keeps_times_lengths_sharing_and_figures(tmp_path, name, as_runs):
    before = public(name)
    path = tmp_path / "out.jsonl.gz"
    write_requests(path, before, as_runs=as_runs)
    after = arrays_of(path)
    assert after.block_tokens == before.block_tokens
    assert after.block_count == before.block_count
    for column in ("starts", "input_tokens", "output_tokens", "session", "turn"):
        assert np.array_equal(getattr(after, column), getattr(before, column)), column
    assert np.allclose(after.time_s, before.time_s - before.time_s[0], atol=1e-6)
    # Equal blocks stay equal, under other numbers.
    pairs = set(zip(before.ids.tolist(), after.ids.tolist(), strict=True))
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs})
    for policy in ("lru", "min", "arc"):
        assert replay(after, policy, 200_000).hit_tokens == replay(before, policy, 200_000).hit_tokens
    again = tmp_path / "again.jsonl.gz"
    write_requests(again, after, as_runs=as_runs)
    assert gzip.decompress(again.read_bytes()) == gzip.decompress(path.read_bytes())


def test_texts_ids_and_names_are_removed(tmp_path, capsys):
    lines = [
        {"timestamp": 1760428258000000 + n, "input": f"secret {n} " * 50, "output": "x", "session_id": f"user-{n}"}
        for n in range(3)
    ]
    source, target = tmp_path / "text.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(it) for it in lines))
    assert run(["trace", "convert", str(source), str(target), "--ids"]) == 0
    text = target.read_text()
    assert not re.search("secret|user|1760428258", text)
    assert {it for line in text.splitlines() for it in json.loads(line)} == {
        *("timestamp", "input_length", "output_length", "block_size", "session_id", "hash_ids")
    }
    assert "3 requests, 6 blocks of 64 tokens" in capsys.readouterr().out


def test_what_cannot_be_converted_is_explained(tmp_path):
    csv = tmp_path / "azure.csv"
    csv.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    with pytest.raises(ConfigError, match="has no blocks"):
        write_requests(tmp_path / "out", arrays_of(csv), as_runs=True)
    packed = arrays_of(MAGAGENT, block_tokens=128)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_requests(csv / "out", packed, as_runs=True)
