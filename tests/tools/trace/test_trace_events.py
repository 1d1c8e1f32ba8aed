"""KV events as a trace: events of a real vLLM give its prompts, and bad files are errors."""

import gzip
import json
import sys

import msgpack
import pytest
import zstandard
from tests.traces import TRACES, arrays_of, replay

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.tools.trace.arrays import read_arrays
from kvtier.tools.trace.formats.base import ReadOptions, open_trace

REAL = TRACES / "vllm_events.msgpack"
RECORDED = json.loads((TRACES / "vllm_events.json").read_text())
BLOCK = RECORDED["block"]


def batches():
    unpacker = msgpack.Unpacker(raw=False)
    unpacker.feed(REAL.read_bytes())
    return list(unpacker)


def written(path, sent, pack_file=bytes):
    path.write_bytes(pack_file(b"".join(msgpack.packb(it) for it in sent)))
    return path


def stored(*hashes, parent=None, **more):
    fields = {"block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": [], "block_size": 16}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU", **more}


def read(path, **reading):
    trace = open_trace(path, ReadOptions(**reading))
    requests = [(round(it.time_s, 3), it.blocks.tolist(), it.output_tokens) for it in trace.requests()]
    return requests, trace.notes


def test_events_of_vllm_give_its_prompts():
    trace = open_trace(REAL)
    assert trace.block_tokens == BLOCK
    requests = list(trace.requests())
    seen = [it for it in RECORDED["asked"] if not it["what"].startswith("there as a whole")]
    assert len(seen) == len(RECORDED["asked"]) - 1  # a fully cached prompt has no event
    assert [it.input_tokens for it in requests] == [it["prompt"] // BLOCK * BLOCK for it in seen]
    # Output: whole blocks after the prompt's last whole one; the last token is not computed.
    ends = [(it["prompt"] + it["generated"] - 1) // BLOCK * BLOCK - it["prompt"] // BLOCK * BLOCK for it in seen]
    assert [it.output_tokens for it in requests] == ends
    # vLLM's own cache evicted nothing, so an infinite cache has the same hits.
    packed = read_arrays(trace, is_strict=True)
    assert replay(packed, "lru", None).hit_tokens == sum(it["cached"] for it in seen)
    # Negative control: see the test with a lost batch.
    assert sum(it["cached"] for it in seen) > 0


def test_a_lost_batch_is_a_warning(tmp_path):
    seen = [it for it in RECORDED["asked"] if not it["what"].startswith("there as a whole")]
    packed = arrays_of(written(tmp_path / "lost", batches()[1:]))
    assert replay(packed, "lru", None).hit_tokens != sum(it["cached"] for it in seen)
    assert any("stored before the start of the file" in it for it in packed.warnings)
    with pytest.raises(ConfigError, match="because of --strict"):
        arrays_of(tmp_path / "lost", is_strict=True)


def test_json_lines_and_arrays_and_packed_files_give_the_same(tmp_path):
    expected = read(REAL)

    def hashes(event):
        # JSON has no bytes.
        names = {it: it.hex() if isinstance(it, bytes) else it for it in event["block_hashes"]}
        parent = event["parent_block_hash"]
        parent = parent.hex() if isinstance(parent, bytes) else parent
        return {**event, "block_hashes": list(names.values()), "parent_block_hash": parent}

    plain = [[ts, [hashes(it) for it in events], rank] for ts, events, rank in batches()]
    objects = [{"ts": ts, "events": events, "data_parallel_rank": rank} for ts, events, rank in plain]
    for number, sent in enumerate((plain, objects)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(f"{json.dumps(it)}\n" for it in sent))
        assert read(path) == expected
    # Older releases of vLLM, and SGLang, write events as arrays.
    names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    arrays = [[ts, [[it[name] for name in names] for it in events]] for ts, events, _ in batches()]
    assert read(written(tmp_path / "arrays.gz", arrays, gzip.compress)) == expected


def test_single_pages_are_one_prompt_and_page_hashes_name_no_prefix(tmp_path):
    """Events of SGLang; older releases hash only the tokens of a page, without its prefix."""
    sent = [
        [0.0, [stored(7), stored(8, parent=7), stored(7, parent=8)]],
        [100.0, [stored(9), stored(8, parent=9)]],
        [200.0, [stored(7), stored(8, parent=7)]],
    ]
    requests, _ = read(written(tmp_path / "pages", sent))
    assert [ids for _, ids, _ in requests] == [[0, 1, 2], [3, 4], [0, 1]]
    assert arrays_of(tmp_path / "pages", is_strict=True).prefix_violations == 0


def test_continued_and_new_requests(tmp_path):
    sent = [
        [0.0, [stored(1, 2)]],
        [1.0, [stored(3, 4, parent=2)]],  # a prompt in pieces
        [5.0, [stored(5, parent=4)]],  # its output
        [5.5, [stored(6, 7, parent=5)]],  # two blocks at once are not an output: the next turn
        [30.0, [stored(8, parent=7)]],  # too late
        [30.0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}, {"type": "AllBlocksCleared"}]],
        [31.0, [stored(1, 2), stored(9, parent=2, medium="CPU"), stored(9, 10, group_idx=1)]],
    ]
    requests, notes = read(written(tmp_path / "events", sent))
    assert requests == [
        (0.0, [0, 1, 2, 3], 16),
        (5.5, [0, 1, 2, 3, 4, 5, 6], 0),
        (30.0, [0, 1, 2, 3, 4, 5, 6, 7], 0),
        (31.0, [0, 1], 0),
    ]
    assert any("cleared 1 times" in it for it in notes)
    assert read(tmp_path / "events", block_tokens=32)[0][0][1] == [1, 3]


def test_ranks_in_one_file_are_separate(tmp_path):
    sent = [[0.0, [stored(1, 2)], 0], [0.1, [stored(1, 2)], 1], [0.2, [stored(3, 4, parent=2)], 0]]
    assert [it[1] for it in read(written(tmp_path / "events", sent))[0]] == [[0, 1, 2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([[0.0, [stored(1)]], [1.0, [stored(1, block_size="x")]]], r"batch 2: block_size is 'x'; allowed: a whole"),
        ([[0.0, [stored(1)]], ["soon", [stored(1)]]], "batch 2: ts is 'soon'; allowed: a number"),
        ([[0.0, [stored(1)]], [1.0, [stored(2.5)]]], "batch 2: block hash 2.5; allowed: whole numbers, bytes"),
        ([[0.0, [stored(1)]], [1.0, [stored(2, parent=[1])]]], "batch 2: block hash .*allowed"),
        ([[0.0, [stored(1)]], [1.0, [{"block_hashes": 1}]]], "batch 2: .* is not an event"),
        ([[0.0, [stored(1)]], [1.0, [{"type": "BlockStored"}]]], "batch 2: block_hashes .* is None; allowed: a list"),
        ([[0.0, [stored(1)]], [1.0]], "batch 2: .* is not a batch"),
        ([[0.0, [stored(1)]], [1.0, 5]], "batch 2: events is 5; allowed: a list"),
        ([[0.0, [stored(1)]], [1.76e12, []]], r"batch 2: ts is 1.76e\+12; allowed: seconds"),
        ([[0.0, [{"type": "AllBlocksCleared"}]]], "no BlockStored event of GPU memory"),
    ],
)
def test_a_malformed_batch_is_named_with_its_field(tmp_path, sent, message):
    for path in (written(tmp_path / "packed", sent), tmp_path / "lines"):
        (tmp_path / "lines").write_text("".join(f"{json.dumps(it)}\n" for it in sent))
        with pytest.raises(ConfigError, match=message):
            list(open_trace(path).requests())


DATA = REAL.read_bytes()
FRAMES = zstandard.compress(DATA[:100]) + zstandard.compress(DATA[100:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DATA[:-7], "cut short after batch 10"),
        (gzip.compress(DATA, mtime=0)[:-9], r"after batch \d+: not msgpack"),
        (FRAMES[:-3], r"after batch \d+: not msgpack"),
        (FRAMES[:-9] + b"?" * 9, r"after batch \d+: not msgpack"),
    ],
    ids=["plain", "gzip", "zstd", "damaged zstd"],
)
def test_a_file_that_is_cut_short_is_refused(tmp_path, content, message):
    (tmp_path / "damaged").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "damaged")


def test_a_file_of_several_frames_is_read(tmp_path):
    (tmp_path / "frames").write_bytes(FRAMES)
    assert read(tmp_path / "frames") == read(REAL)


def test_the_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    assert run(["replay", "describe", str(REAL)]) == 2
    assert "pip install 'msgpack>=1.0.5'" in capsys.readouterr().err
