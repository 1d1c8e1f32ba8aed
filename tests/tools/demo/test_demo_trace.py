"""The demo's prompts: real conversations, each prompt continuing the earlier prompt and the answer given to it."""

import gzip
import json

import pytest

from kvtier.errors import ConfigError
from kvtier.tools.demo.request_plan import (
    TRACE,
    PlannedRequest,
    TraceLine,
    build_prompt,
    choose_sessions,
    find_parent,
    most_tokens,
    one_line,
    plan_requests,
    question_of,
    read_trace,
)


def test_the_trace_is_the_whole_one_and_sorted_by_time():
    rows = read_trace()
    assert len(rows) == 162
    assert len({row.session for row in rows}) == 12
    assert [row.time_us for row in rows] == sorted(row.time_us for row in rows)


def test_a_prompt_holds_the_earlier_prompt_and_its_answer():
    steps = [PlannedRequest(0, 0, None, (1, 2, 3)), PlannedRequest(0, 1, 0, (4, 5)), PlannedRequest(0, 2, 1, ())]
    prompts, answers = [], []
    for position, step in enumerate(steps):
        prompts.append(build_prompt(step, prompts, answers))
        answers.append([90 + position, 91 + position])
    assert prompts == [[1, 2, 3], [1, 2, 3, 90, 91, 4, 5], [1, 2, 3, 90, 91, 4, 5, 91, 92]]


def test_the_end_of_an_answer_is_in_the_next_prompt_exactly_once():
    steps = [PlannedRequest(0, 0, None, (1,), 9), PlannedRequest(0, 1, 0, (2,), 9)]
    assert build_prompt(steps[1], [[1]], [[5, 6]]) == [1, 5, 6, 9, 2]
    assert build_prompt(steps[1], [[1]], [[5, 9]]) == [1, 5, 9, 2]
    assert most_tokens(steps, 2) == len([1, 5, 6, 9, 2, 7, 8])


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("<pr_description>\nConsider the following PR description:\nIt is slow.\nDescription\n", "It is slow."),
        ("\n\n<returncode>0</returncode>\n<output>\n</output>", "exit code 0: no output"),
        (
            "\n<returncode>1</returncode>\n<output>\nTraceback (most\n  x\nKeyError: 1\n</output>",
            "exit code 1: KeyError: 1",
        ),
        ("\n\nOne\x1b[2J\x9b action\n", "One [2J action"),
        ("<a>\n", "no output"),
        ("x" * 90, "x" * 77 + "..."),
    ],
)
def test_the_informative_line_of_a_message_is_its_question(text, question):
    assert question_of(text) == question


def test_a_line_for_the_terminal_has_no_control_characters():
    assert one_line("".join(map(chr, range(0x110000))), 2_000_000).isprintable()


def test_a_branch_continues_the_request_that_it_left_from_not_the_latest():
    texts = ["task", "task. look here", "task. look there"]
    assert find_parent(texts, 2) == 0
    steps = [PlannedRequest(0, 0, None, (1,)), PlannedRequest(0, 1, 0, (2,)), PlannedRequest(0, 2, 0, (3,))]
    assert build_prompt(steps[2], [[1], [1, 50, 2]], [[50], [60]]) == [1, 50, 3]


@pytest.mark.parametrize(
    ("texts", "parent"),
    [
        (["a", "a b", "a b c"], 1),
        (["a b", "a", "a b c"], 0),
        (["a", "a", "a b"], 1),  # of equals the latest
        (["a", "b"], None),
        (["a"], None),
    ],
)
def test_the_longest_beginning_is_continued(texts, parent):
    assert find_parent(texts, len(texts) - 1) == parent


def test_the_shortest_conversations_are_chosen_and_their_order_in_time_is_kept():
    rows = [
        TraceLine(1, "long", "xxxx"),
        TraceLine(2, "short", "x"),
        TraceLine(3, "middle", "xx"),
        TraceLine(4, "short", "x"),
    ]
    assert [row.time_us for row in choose_sessions(rows, 2)] == [2, 3, 4]


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        TRACE.read_bytes()[:-20],
        gzip.compress(b"no json", mtime=0),
        gzip.compress(b'{"timestamp": 1}\n', mtime=0),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "trace.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"trace .* cannot be read"):
        read_trace(path)


def test_a_few_requests_are_the_first_turns_of_each_conversation():
    plan = plan_requests(read_trace(), sessions=3, requests=7)
    assert [(it.session, it.turn) for it in plan.requests] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_the_licence_of_the_trace_stands_beside_it():
    about = (TRACE.parent / "README.md").read_text(encoding="utf-8")
    assert TRACE.name in about
    assert "Apache-2.0" in about
    with gzip.open(TRACE, "rt", encoding="utf-8") as lines:
        assert set(json.loads(next(lines))) == {"timestamp", "input", "output", "session_id"}
