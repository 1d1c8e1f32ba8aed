"""A real engine answers on its control socket: where a prompt is, why a request missed, what clearing does, health."""

import time
from pathlib import Path
from typing import Any

import pytest
import sabotage
from engines import LONG, SHORT, Expected, Start
from harness import Ask
from judge import is_same, prompt
from settings import CHUNK, connector, whole

from kvtier.runtime.control_socket import FORMS, ControlError, ask

pytestmark = [pytest.mark.engine, pytest.mark.fleet]

SALT = "tenant-a"


@pytest.fixture
def at(tmp_path: Path) -> Path:
    """The socket of the engine under test."""
    return tmp_path / "run" / "control"


def codes(at: Path, request: str) -> list[str]:
    return [reason["code"] for reason in why(at, request)["reasons"]]


def why(at: Path, request: str) -> dict[str, Any]:
    whole, checked = (ask(at, "why", {"request": request}, form=form) for form in (None, FORMS["why"]))
    assert whole | {"ended_ago_s": 0} == checked | {"ended_ago_s": 0}
    return checked


def text_of(at: Path, request: str, code: str) -> str:
    return next(reason["text"] for reason in why(at, request)["reasons"] if reason["code"] == code)


def found(at: Path, tokens: list[int], **more: str) -> int:
    return ask(at, "find", {"tokens": tokens, **more})["hit_tokens"]


def places(at: Path, tokens: list[int]) -> list[tuple[int, int, set[str]]]:
    """The ranges of a prompt, once nothing is on its way to a tier."""
    return [(it["from"], it["to"], set(it["places"])) for it in ask(at, "find", {"tokens": tokens})["ranges"]]


def until_in(at: Path, tokens: list[int], place: str) -> None:
    until_s = time.monotonic() + 60
    while not all(place in it[2] for it in places(at, tokens)):
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.vllm_core
def test_an_engine_explains_finds_and_clears(start: Start, expected: Expected, tmp_path: Path, at: Path) -> None:
    engine = start("llama", connector(tmp_path / "kv", control__socket=str(at)), max_num_seqs=4)
    wanted, full = expected("llama")["long"], whole(len(LONG))
    health = ask(at, "health", {}, form=FORMS["health"])
    assert (health["live"], health["ready"], health["problem"]) == (True, True, "")
    assert health["tiers"]["directory"] == {"reads": True, "writes": True, "detail": ""}
    assert places(at, LONG) == [(0, full, set())]
    nothing = ask(at, "find", {"tokens": LONG})
    assert (nothing["hit_tokens"], nothing["end"]) == (0, "nothing holds the chunk at token 0")

    assert is_same("llama", engine.ask(LONG)[0], wanted)  # r0
    assert codes(at, "r0") == ["absent", "shared"]
    until_in(at, LONG, "directory")
    assert places(at, LONG) == [(0, full, {"host", "directory"})]
    assert found(at, LONG) == full
    assert found(at, [*LONG[:600], 7, *LONG[601:]]) == 2 * CHUNK
    engine.ask(LONG)  # r1
    assert codes(at, "r1") == ["engine", "complete"]
    engine.forget()
    assert engine.hits_of(LONG) == full  # r2
    assert codes(at, "r2") == ["complete"]
    assert why(at, "r2")["loaded_tokens"] == {"host": full}
    engine.ask(prompt(CHUNK, 9))  # r3
    assert codes(at, "r3") == ["no_chunk"]
    engine.ask(Ask(prompt(600, 10), transfer={"kvtier": {"tokens": 512}}))  # r4
    assert codes(at, "r4") == ["absent", "announced", "shared"]
    engine.ask([*LONG[:600], 7, *LONG[601:]])  # r5
    engine.forget()
    assert engine.hits_of(Ask(LONG, transfer={"max_load_tokens": 0})) == 0  # r6
    assert codes(at, "r6") == ["hint", "complete"]
    engine.forget()
    engine.ask([*LONG[:900], *prompt(500, 11)])  # r7
    assert codes(at, "r7") == ["absent", "shared"]
    assert "has 768 tokens (request r6)" in text_of(at, "r7", "shared")
    (cut,) = why(at, "r7")["cuts"]
    assert (cut["request"], cut["at_token"], cut["lost_tokens"], cut["repeated_tokens"]) == ("r6", 900, 500, 0)
    assert (cut["earlier"]["ids"], cut["this"]["text"]) == (LONG[900:916], None)
    assert [why(at, f"r{number}")["cuts"] for number in (0, 1, 2, 3, 4, 6)] == [[]] * 6

    # A salt has KV of its own, which is cleared alone.
    engine.ask(Ask(LONG, salt=SALT))  # r8
    assert (found(at, LONG, salt=SALT), found(at, LONG, salt="another")) == (full, 0)
    ask(at, "clear", {"salt": SALT})
    assert (found(at, LONG, salt=SALT), found(at, LONG)) == (0, full)
    engine.forget()
    assert engine.hits_of(Ask(LONG, salt=SALT)) == 0  # r9
    engine.forget()
    (again,) = engine.ask(Ask(LONG, salt=SALT))
    assert is_same("llama", again, wanted)
    assert (again.cached, found(at, LONG, salt=SALT)) == (full, full)

    # Everything: nothing is found, whatever the tier still holds, and answers stay right.
    cleared = ask(at, "clear", {"all": True})
    assert cleared["freed_objects"] > 0
    assert "directory" in cleared["notes"][0]
    assert (found(at, LONG), found(at, SHORT), found(at, LONG, salt=SALT)) == (0, 0, 0)
    engine.forget()
    before = engine.external_hits()
    assert is_same("llama", engine.ask(LONG)[0], wanted)
    assert engine.external_hits() == before
    assert found(at, LONG) == full
    with pytest.raises(ControlError, match=r"request 'r99' is unknown; the last .* ended requests and 0 open"):
        why(at, "r99")
    engine.close()
    assert not at.exists()
    with pytest.raises(ControlError, match="no engine listens"):
        ask(at, "health", {})


def test_a_stamp_is_named_with_its_text_and_never_to_another_tenant(start: Start, tmp_path: Path, at: Path) -> None:
    """The engine has a tokenizer, whose tokens are ``t7``. Nothing of a prompt is in its log."""
    engine = start("llama", connector(tmp_path / "kv", control__socket=str(at)), skip_tokenizer_init=False)
    stamped = [[*LONG[:50], *stamp, *LONG[50:]] for stamp in ([11], [12, 13], [14])]
    engine.ask(stamped[0])  # r0
    engine.ask(Ask(stamped[1], salt=SALT))  # r1
    assert why(at, "r1")["cuts"] == []
    engine.ask(Ask(stamped[2], salt=SALT))  # r2
    (cut,) = why(at, "r2")["cuts"]
    assert (cut["request"], cut["at_token"], cut["is_exact"]) == ("r1", 50, True)
    assert cut["lost_tokens"] == len(stamped[2]) - 50
    assert cut["repeated_tokens"] > 0.95 * cut["lost_tokens"]
    engine.ask(stamped[1])  # r3
    (cut,) = why(at, "r3")["cuts"]
    assert cut["request"] == "r0"
    for part, ids in (
        ("before", LONG[34:50]),
        ("earlier", [11, *LONG[50:65]]),
        ("this", [12, 13, *LONG[50:64]]),
    ):
        assert cut[part] == {"ids": ids, "text": " ".join(f"t{token}" for token in ids)}
    engine.ask([*stamped[1], *prompt(600, 9)])  # r4: it only grows
    assert why(at, "r4")["cuts"] == []
    engine.close()
    assert "t12 t13" not in engine.log.read_text()
    assert "12, 13" not in engine.log.read_text()


@pytest.mark.vllm_core
def test_an_internal_error_shows_in_health_and_the_engine_goes_on(
    start: Start, expected: Expected, tmp_path: Path, at: Path
) -> None:
    engine = start("llama", connector(tmp_path / "kv", control__socket=str(at)), sabotage="sabotage:fail_lookups")
    assert ask(at, "health", {})["ready"]
    assert is_same("llama", engine.ask(SHORT)[0], expected("llama")["short"])
    health = ask(at, "health", {}, form=FORMS["health"])
    assert (health["live"], health["ready"]) == (True, False)
    assert health["problem"] == "an internal error has switched kvtier off: RuntimeError: a mistake of ours"
    assert is_same("llama", engine.ask(LONG)[0], expected("llama")["long"])


def test_what_was_evicted_is_named_as_removed(start: Start, tmp_path: Path, at: Path) -> None:
    # Two chunks in host memory, and no tier.
    engine = start("llama", connector(None, host__capacity_bytes="1MiB", control__socket=str(at)))
    engine.ask(SHORT)
    engine.ask(LONG)
    engine.forget()
    assert "it has left host memory recently" in ask(at, "find", {"tokens": SHORT})["end"]
    engine.ask(SHORT)
    assert codes(at, "r2") == ["absent", "removed"]
    assert "request r0, ended" in text_of(at, "r2", "removed")


def test_a_pin_survives_pressure_and_a_prefetch_brings_back_what_was_evicted(
    start: Start, expected: Expected, tmp_path: Path, at: Path
) -> None:
    """Host memory of 16 chunks, through which 25 pass."""
    engine = start("llama", connector(tmp_path / "kv", host__capacity_bytes="8MiB", control__socket=str(at)))
    full = whole(len(SHORT))
    engine.ask(SHORT)
    until_in(at, SHORT, "directory")
    pinned = ask(at, "pin", {"tokens": SHORT, "seconds": 600})
    assert (pinned["pinned_tokens"], pinned["host_tokens"], pinned["stored_tokens"]) == (full, full, full)

    def press(seed: int) -> None:
        for number in range(5):
            engine.ask(prompt(1400, seed + number))
        engine.drain()

    press(100)
    assert "host" in places(at, SHORT)[0][2]
    engine.forget()
    assert is_same("llama", engine.ask(SHORT)[0], expected("llama")["short"])
    assert ask(at, "unpin", {"tokens": SHORT})["unpinned_tokens"] == full
    press(200)
    assert "host" not in places(at, SHORT)[0][2], "no longer kept"
    fetched = ask(at, "prefetch", {"tokens": SHORT})
    assert (fetched["host_tokens"], fetched["stored_tokens"]) == (full, full)
    engine.forget()
    assert is_same("llama", engine.ask(SHORT)[0], expected("llama")["short"])
    engine.drain()
    assert why(at, "r12")["found_tokens"] == {"host": full}


def test_a_tier_that_is_down_is_named(start: Start, hangs: Path, tmp_path: Path, at: Path) -> None:
    start("llama", connector(tmp_path / "kv")).ask_and_close(LONG)
    limits = {"probe_deadline_s": 1.0, "transfer_deadline_s": 1.0, "failures": 1, "retry_s": 30.0}
    engine = start(
        "llama",
        connector(
            tmp_path / "kv", control__socket=str(at), **{f"tiers__directory__{name}": it for name, it in limits.items()}
        ),
        sabotage="sabotage:hang_probes",
        environment={sabotage.FLAG: str(hangs)},
    )
    engine.ask(LONG)
    assert codes(at, "r0")[0] == "obstacle"
    assert "tier directory: reads failed 1 times in a row" in text_of(at, "r0", "obstacle")
    health = ask(at, "health", {})
    assert (health["ready"], health["tiers"]["directory"]["reads"]) == (True, False)
    began_s = time.monotonic()
    result = ask(at, "find", {"tokens": LONG}, 5.0)
    assert result["silent"] == {"directory": "is down"}
    assert time.monotonic() - began_s < 5.0
    hangs.unlink()


def test_the_planner_and_a_cut_load_are_named(start: Start, tmp_path: Path, at: Path) -> None:
    """Copies take longer than computing: the first load is cut, and later ones do not begin."""
    settings = connector(tmp_path / "kv", planner__enabled=True, control__socket=str(at))
    engine = start("llama", settings, sabotage="sabotage:late_copies")
    for _ in range(6):
        engine.ask(LONG)
        engine.drain()
        engine.forget()
    seen = {code for number in range(1, 6) for code in codes(at, f"r{number}")}
    assert {"cut", "planner"} <= seen, [why(at, f"r{number}") for number in range(1, 6)]


def test_changed_weights_and_a_missing_key_are_named(start: Start, other: Path, tmp_path: Path, at: Path) -> None:
    engine = start("llama", connector(tmp_path / "kv", control__socket=str(at)))
    engine.do("changes:write_directly", str(other))
    engine.ask(LONG)
    assert codes(at, "r0") == ["not_cached"]
    assert "weights have changed" in ask(at, "health", {})["problem"]
    engine.close()
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"1 another {'ab' * 32}\n")
    settings = {"store__keys_file": str(keys), "store__tenant": "mine", "tiers__directory__seal": "on"}
    engine = start("llama", connector(tmp_path / "kv", control__socket=str(at), **settings))
    engine.ask(LONG)
    assert "the tenant has no key" in text_of(at, "r0", "obstacle")
    assert "the tenant has no key" in ask(at, "health", {})["problem"]
    with pytest.raises(ControlError, match="nothing can be found: the tenant has no key"):
        found(at, LONG)


def test_what_lies_at_the_path_never_stops_an_engine(start: Start, expected: Expected, at: Path) -> None:
    """A file, or the socket of another engine: the engine starts without a socket, and the other one keeps its own."""
    at.parent.mkdir(mode=0o700)
    at.write_text("a file")
    first = start("llama", connector(None, control__socket=str(at)))
    with pytest.raises(ControlError, match="no engine listens"):
        ask(at, "health", {})
    assert at.read_text() == "a file"
    first.close()
    at.unlink()
    first = start("llama", connector(None, control__socket=str(at)))
    second = start("llama", connector(None, control__socket=str(at)))
    assert is_same("llama", second.ask(LONG)[0], expected("llama")["long"])
    assert found(at, LONG) == 0, "the first engine answers"
    first.close()
    with pytest.raises(ControlError, match="no engine listens"):
        ask(at, "health", {})
