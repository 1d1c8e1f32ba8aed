"""Requests with text or tokens, in the forms of OpenAI, vLLM and AIPerf; and what is refused by its name."""

import json

import numpy as np
import pytest
from tests.tools.trace.test_trace_readers import read, written
from tests.traces import arrays_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvtier.errors import ConfigError
from kvtier.tools.trace.formats.base import open_trace

HELLO = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Name a colour, please, of the sky."}]
LATER = [*HELLO, {"role": "assistant", "content": "Blue."}, {"role": "user", "content": "Another?"}]

# The line of https://platform.openai.com/docs/guides/batch, with other messages.
BATCH = {
    "custom_id": "request-1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": HELLO, "max_tokens": 1000},
}


def test_chats_of_openai_share_their_history_wherever_they_are(tmp_path):
    later = {**BATCH, "body": {**BATCH["body"], "messages": LATER}}
    batch = read(written(tmp_path / "batch", [BATCH, later]), block_tokens=4)
    assert [(it.time_s, it.output_tokens) for it in batch] == [(0.0, 1000), (1.0, 1000)]
    one, two = (it.blocks for it in batch)
    whole = (batch[0].input_tokens - 1) // 4  # the simple rule joins the last line break to the answer's first word
    assert two[:whole] == one[:whole]
    assert two[whole + 1 :]
    # The same messages without the envelope, with AIPerf's length and delay, and in one array.
    bare = [
        {"session_id": "s", "messages": HELLO, "output_length": 1000, "timestamp": 0},
        {"session_id": "s", "messages": LATER, "output_length": 1000, "delay": 1000},
    ]
    for path in (written(tmp_path / "bare", bare), written(tmp_path / "array", [json.dumps(bare, indent=1)])):
        assert [it._replace(line=0, session=None) for it in read(path, block_tokens=4)] == [
            it._replace(line=0) for it in batch
        ]
    changed = [{**HELLO[0], "content": "Be brief."}, *LATER[1:]]
    other = read(written(tmp_path / "other", [{"messages": changed}, {"messages": LATER}]), block_tokens=4)
    assert {*other[0].blocks} & {*other[1].blocks} == {other[0].blocks[0]}  # the role's name
    (tools,) = read(written(tmp_path / "tools", [{"messages": LATER, "tools": [{"name": "f"}]}]), block_tokens=4)
    assert tools.input_tokens > batch[1].input_tokens


def test_answers_calls_and_images_of_messages(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
    shown = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]
    call = [*shown, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}]
    path = written(tmp_path / "trace", [{"messages": shown}, {"messages": call}])
    first, second = read(path, block_tokens=1)
    # A last message of the assistant is the answer.
    assert (first.blocks, first.output_tokens) == (second.blocks, 0)
    assert second.output_tokens > 0
    assert first.input_tokens < 100
    assert "2 images or other parts count as a few tokens each" in arrays_of(path).warnings
    other = [{"role": "user", "content": [shown[0]["content"][0], {**image, "image_url": {"url": "other"}}]}]
    again = read(written(path, [{"messages": it} for it in (shown, other, shown)]), block_tokens=1)
    assert again[0].blocks == again[2].blocks != again[1].blocks


def test_prompts_and_token_ids(tmp_path):
    # `vllm bench serve --dataset-name custom`: CustomDataset of vllm/benchmarks/datasets.
    custom = [{"prompt": "What is the capital of India?", "output_tokens": 10}, {"prompt": "What is that?"}]
    path = written(tmp_path / "custom", custom)
    assert [(it.time_s, it.input_tokens, it.output_tokens) for it in read(path)] == [(0.0, 8, 10), (1.0, 4, 0)]
    assert any("no timestamps" in it for it in arrays_of(path).notes)
    # One word, one token.
    words = Tokenizer(WordLevel({"What": 0, "is": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    by_words = read(path, tokenizer=tmp_path / "tokenizer.json", block_tokens=2)
    ids = [{"prompt_token_ids": [0, 1, 2, 2, 2, 2, 2], "output_tokens": 10}, {"prompt": [0, 1, 2, 2]}]
    assert read(written(path, ids), block_tokens=2) == by_words
    assert by_words[1].blocks == by_words[0].blocks[:2]
    (text,) = read(written(path, [{"text_input": "a b", "output_length": 20}]))
    assert (text.input_tokens, text.output_tokens) == (2, 20)


# The shape of ShareGPT_V3_unfiltered_cleaned_split.json. Its conversations may begin with an answer.
SHAREGPT = [
    {
        "id": "a_0",
        "conversations": [
            {"from": "human", "value": "Name a colour."},
            {"from": "gpt", "value": "Blue."},
            {"from": "human", "value": "Another?"},
            {"from": "gpt", "value": "Green, of the grass."},
        ],
    },
    {"id": "a_1", "conversations": [{"from": "gpt", "value": "Red."}, {"from": "human", "value": "And?"}]},
    {"id": "b_0", "conversations": []},
]


def test_each_answer_of_a_conversation_is_a_request(tmp_path):
    path = written(tmp_path / "trace.json", [json.dumps(SHAREGPT, indent=2)])
    one, two = read(path, block_tokens=4, window_h=2, seed=7)
    start_s = np.random.default_rng(7).uniform(0, 7200.0)
    assert [(it.time_s, it.session, it.line) for it in (one, two)] == [(start_s, "a_0", 1), (start_s + 30, "a_0", 1)]
    whole = (one.input_tokens - 1) // 4
    assert two.blocks[:whole] == one.blocks[:whole]
    assert two.input_tokens > one.input_tokens + one.output_tokens
    assert "window_h" in open_trace(path).options
    assert any("start uniformly within 10 h" in it for it in arrays_of(path).notes)
    # LMSYS-Chat-1M and WildChat, as lines.
    roles = {"human": "user", "gpt": "assistant"}
    turns = [{"role": roles[it["from"]], "content": it["value"]} for it in SHAREGPT[0]["conversations"]]
    lines = read(written(path, [{"conversation_id": "a_0", "conversation": turns}]), block_tokens=4, window_h=2, seed=7)
    assert lines == [one, two]
    for bad, message in (
        ({"id": 1}, "line 2: 'conversations' is missing"),
        ({"conversations": [{"from": "gpt"}, 5]}, "line 2: conversations holds 5; allowed: objects with role"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(written(path, [SHAREGPT[0], bad]))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([BATCH, {**BATCH, "body": {}}], "line 2: the line has no prompt; allowed: one of the fields input, prompt"),
        ([BATCH, {"messages": 5}], "line 2: messages is 5; allowed: a list of messages"),
        ([BATCH, {"messages": ["hi"]}], "line 2: messages holds 'hi'; allowed: objects with role and content"),
        ([BATCH, {"messages": [{"role": "user", "content": [5]}]}], "line 2: messages holds content 5; allowed: text"),
        ([BATCH, {"messages": HELLO, "message_mode": "delta"}], "line 2: message_mode is 'delta'; allowed: 'history'"),
        ([BATCH, {"prompt": ["a", "b"]}], r"line 2: prompt is \['a', 'b'\]; allowed: a string or a list of token ids"),
        ([BATCH, {"prompt_token_ids": [1, True]}], "line 2: prompt_token_ids is .*; allowed: a string or a list of"),
        ([BATCH, {"prompt": "a", "output_tokens": -1}], "line 2: output_tokens is -1; allowed: a whole number"),
        ([BATCH, {"prompt": "a", "timestamp": 1}], "line 2: the line has a timestamp, but the first line has none"),
        ([{"prompt": "a", "timestamp": 1}, BATCH], "line 2: 'timestamp' is missing"),
        (
            [{"text_input": "a", "session_id": 1}, {"text_input": "b", "session_id": 1}],
            "line 2: text_input in a later line of a session adds",
        ),
        (['[{"prompt": "a"},', '{"prompt": 5}]'], "entry 2: prompt is 5; allowed"),
        (['[{"prompt": "a"},', '"b"]'], "entry 2: 'b' is not a JSON object"),
        (['[{"prompt": "a"}, {"prompt": ]'], "entry 2: not JSON: .*; allowed: a JSON array of objects"),
        (['[{"prompt": "a"},'], "entry 2: the array has no end"),
        ([{"custom_id": "a", "response": {}}], "line 1: this seems to be the output of OpenAI's batch API.*input file"),
        ([{"metadata": {}, "metrics": {}}], "seems to be AIPerf's record of its requests, which is not read; use"),
        ([{"session_id": "a", "turns": [{"text": "a"}]}], "seems to be AIPerf's multi_turn"),
        ([{"text": "a"}], "seems to be a dataset of texts .*rename text to prompt"),
        ([{"question": "a"}], "line 1: unknown format; allowed: JSON lines with hash_ids"),
    ],
)
def test_bad_lines_name_file_line_and_field_and_other_formats_are_refused_by_name(tmp_path, lines, message):
    path = written(tmp_path / "trace", lines)
    with pytest.raises(ConfigError, match=f"trace {path}, .*{message}"):
        read(path)
    if len(lines) > 1 and isinstance(lines[0], dict):
        read(written(path, lines[:-1]))  # negative control


def test_large_arrays_are_read_entry_by_entry(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtier.tools.trace.trace_files._ENTRY_BYTES", 7)
    prompts = ["ä" * n for n in range(1, 40)]
    text = json.dumps([{"prompt": it} for it in prompts], indent=2, ensure_ascii=False)
    path = written(tmp_path / "trace", ["\ufeff" + text])
    assert [it.line for it in read(path)] == list(range(1, 40))
    monkeypatch.setattr("kvtier.tools.trace.trace_files.LINE_BYTES_MAX", 30)
    with pytest.raises(ConfigError, match=r"entry 1\d: not JSON"):
        read(path)
    assert open_trace(path).name == str(path)
