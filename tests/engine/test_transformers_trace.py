"""A trace that is recorded while a real model generates replays to the hits that it had."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attaching import Attach
from tests.leftovers import contents, forms_of_digests, forms_of_tokens, journal_names, left
from tiny_transformers import batch, llama, tokens

from kvtier.cli.main import run
from kvtier.connect.transformers import CallReport
from kvtier.errors import ConfigError
from kvtier.keys.chain import Chain
from kvtier.keys.object_names import object_names
from kvtier.policy.adaptive import Adaptive
from kvtier.types import NextTurn

pytestmark = pytest.mark.engine

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3, "min_new_tokens": 3}
SYSTEM, TURN = tokens(70, 1), tokens(60, 2)
PROMPTS = [
    [*SYSTEM, *tokens(30, 3)],
    [*SYSTEM, *tokens(31, 4)],
    [*SYSTEM, *tokens(30, 3), *TURN],
    [*SYSTEM, *tokens(30, 3), *TURN, *tokens(47, 5)],
    tokens(90, 6),
    [*SYSTEM, *tokens(31, 4)],
]


def recorded(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The trace file, and its lines."""
    (path,) = (tmp_path / "traces").iterdir()
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def test_a_replay_of_the_recording_hits_what_the_live_run_hit(
    attached: Attach, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    kv = attached(llama(), trace__path=tmp_path / "traces")
    restored, generated = [], []
    for prompt in PROMPTS:
        kv.generate(torch.tensor([prompt]), **GREEDY)
        restored.append(kv.last.restored_tokens)
        generated.append(kv.last.generated_tokens)
        assert kv.flush(60)
    kv.close()
    assert restored == [0, 64, 96, 160, 0, 96]
    path, lines = recorded(tmp_path)
    assert [it["input_length"] for it in lines] == [len(it) for it in PROMPTS]
    assert [it["output_length"] for it in lines] == generated == [3] * 6

    def replayed(*options: str) -> int:
        arguments = ("--policy", "lru", "--json", "--jobs", "1", "--strict", *options)
        assert run(["replay", str(path), *arguments]) == 0
        return json.loads(capsys.readouterr().out)["results"][0]["hit_tokens"]

    assert replayed("--capacity-tokens", "inf") == sum(restored)
    # Negative controls: less room, or ids that no longer tell which blocks are equal, give other figures.
    assert replayed("--capacity-tokens", "64") < sum(restored)
    for number, line in enumerate(lines):
        line["hash_ids"] = [(number << 50) + it for it in line["hash_ids"]]
    path.write_text("".join(f"{json.dumps(it)}\n" for it in lines))
    assert replayed("--capacity-tokens", "inf") == 0


def test_each_row_of_a_batch_is_a_request(attached: Attach, tmp_path: Any) -> None:
    kv = attached(llama(), trace__path=tmp_path / "traces")
    input_ids, mask = batch(tokens(50, 1), tokens(20, 2))
    kv.generate(input_ids, attention_mask=mask, **GREEDY)
    kv.close()
    _, lines = recorded(tmp_path)
    assert [(it["input_length"], len(it["hash_ids"])) for it in lines] == [(50, 3), (20, 1)]


def test_without_the_setting_nothing_is_recorded(kv: Any, tmp_path: Any) -> None:
    kv.generate(torch.tensor([PROMPTS[0]]), **GREEDY)
    assert kv._current().recorder is None


def test_sessions_are_recorded_and_what_they_expect_reaches_the_evictor(
    attached: Attach, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[tuple[str, NextTurn | None]] = []
    owners: list[str | None] = []
    real = Adaptive.added
    monkeypatch.setattr(Adaptive, "expects", lambda _self, *said: found.append(said))
    monkeypatch.setattr(Adaptive, "added", lambda self, use: (owners.append(use.conversation), real(self, use)))
    kv = attached(llama(), trace__path=tmp_path / "traces")
    kv.generate(torch.tensor([PROMPTS[0]]), session="chat", **GREEDY)
    kv.expects("chat", "user")
    input_ids, mask = batch(PROMPTS[4], tokens(20, 2))
    kv.generate(input_ids, attention_mask=mask, session=["x", None], **GREEDY)
    kv.expects("unknown", NextTurn.NOBODY)
    assert kv.flush(60)
    # An invalid session never makes a call fail; `expects` raises.
    with caplog.at_level("WARNING"):
        for bad in (7, ["x"], ["x", 7]):
            kv.generate(input_ids, attention_mask=mask, session=bad, **GREEDY)  # type: ignore[arg-type]
    assert caplog.text.count("allowed: a string, or one for each of 2 rows") == 3
    with pytest.raises(ConfigError, match=r"next_turn is 'me'; allowed: 'tool', 'user', 'nobody', None"):
        kv.expects("chat", "me")
    with pytest.raises(ConfigError, match="session is 7; allowed: a string"):
        kv.expects(7, "user")  # type: ignore[arg-type]
    kv.close()
    kv.expects("chat", "nobody")  # ignored
    assert set(found) == {("chat", NextTurn.USER), ("unknown", NextTurn.NOBODY)}
    assert set(owners) >= {"chat", "x"}
    path, lines = recorded(tmp_path)
    named = [it.get("session_id") for it in lines]
    assert [it is None for it in named] == [False, False, *[True] * 7]
    assert "chat" not in path.read_text()


def test_nothing_is_left_of_a_call_that_opts_out(
    attached: Attach, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each kind of call once with `store=False` and once without, which is the control."""
    tiers = [f"{kind}:{tmp_path / kind}?capacity_bytes=24MiB" for kind in ("directory", "disk")]
    folders = [tmp_path / name for name in ("directory", "disk", "trace", "journal")]
    caplog.set_level("DEBUG", "kvtier")
    kv = attached(
        llama(), directory=None, tiers=tiers, trace__path=tmp_path / "trace", journal__path=tmp_path / "journal"
    )
    kv.generate(torch.tensor([PROMPTS[0]]), **GREEDY)  # others may share what it stores
    assert kv.flush(60)
    common, (hidden, shown) = PROMPTS[0], ([tokens(90, seed + number) for number in range(3)] for seed in (30, 40))

    def call(own: list[list[int]], name: str, **store: Any) -> list[CallReport]:
        input_ids, mask = batch(own[1], own[2])
        reports = []
        for given, more in (
            (torch.tensor([[*common, *own[0]]]), {"session": f"{name}-session"}),
            (input_ids, {"attention_mask": mask, "session": [f"{name}-session", 7], "return_dict_in_generate": True}),
            (input_ids, {"attention_mask": mask, "do_sample": True, "num_return_sequences": 2}),
        ):
            kv.generate(given, **(GREEDY | more | store))
            reports.append(kv.last)
        with pytest.raises(ValueError, match="cache_implementation"):  # the library does; kvtier has said why
            kv.generate(input_ids, cache_implementation=f"{name}-cache", **GREEDY, **store)
        return reports

    assert [it.stored_chunks for it in call(hidden, "hidden", store=False)] == [0] * 3
    assert [it.stored_chunks for it in call(hidden, "hidden", store="no")] == [0] * 3
    first = call(shown, "shown")[0]
    assert first.stored_chunks > 0
    assert first.restored_tokens == call(hidden, "hidden", store=None)[0].restored_tokens == 96
    assert caplog.text.count("store is of type str; allowed: True, False; nothing of the call is stored") == 1
    assert kv.flush(60)

    def forms(own: list[list[int]], name: str) -> dict[str, list[bytes]]:
        """Everything by which one of the calls could be known again."""
        opened, found = kv._current(), {"name": [f"{name}-".encode()]}
        layout, recorder = opened.layout, opened.recorder
        assert recorder is not None
        for each, shared in ((own[0], common), (own[1], []), (own[2], [])):
            chain = Chain(opened.root, kv.chunk_tokens)
            chain.extend([*shared, *each])
            keys = chain.prefix().keys[len(shared) // kv.chunk_tokens :]
            ids = {"trace": [str(recorder._named(it)).encode() for it in keys]}
            ids["journal"] = journal_names(keys, opened.root)
            names = object_names(keys, 0, layout.part(0), layout.digest(0))
            hashed = forms_of_digests("key", keys) | forms_of_digests("object", names)
            for kind, values in (forms_of_tokens(each) | hashed | ids).items():
                found.setdefault(kind, []).extend(values)
        return found

    unwanted, wanted = forms(hidden, "hidden"), forms(shown, "shown")
    kv.close()
    places = {it.name: contents(it) for it in folders} | {"log": caplog.text.encode()}
    assert left(unwanted, places | {"elsewhere": contents(tmp_path, *folders)}) == {}
    assert left(wanted, places) == {
        "directory": {"object", "object, hex"},
        "disk": {"object"},
        "trace": {"trace"},
        "journal": {"journal"},
        "log": {"name"},
    }
