"""A request that says "store nothing" leaves nothing behind, wherever one that does not say it leaves something."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engines import SHORT, Start
from harness import Ask, Engine
from judge import prompt
from record_events import published, publisher
from settings import CHUNK, connector, whole
from tests.leftovers import contents, forms_of_digests, forms_of_tokens, journal_names, left
from tests.sealed_places import _heads

from kvtier.runtime.control_socket import ControlError, ask

pytestmark = [pytest.mark.engine, pytest.mark.vllm_core]

FIELDS = {"session": "{}-session", "next_turn": "user", "priority": "{}-priority", "retain_s": 600, "{}-field": 1}
"""Hints of each request. One of them is invalid, and one unknown, so that the log names the request."""
TIERS = ("directory", "disk", "shared_directory")


def envelope(**hints: object) -> dict[str, Any]:
    action = {"action_id": "1", "action_type": "kvtier.hints", "action_version": "1.0", "payload": hints}
    return {"kv_hint": {"protocol_version": "0.1", "message_id": "m", "actions": [action]}}


WAYS: list[dict[str, Any]] = [
    {"store": False},
    {"max_offload_tokens": 0},
    envelope(store=False),
    {"store": "no"},
    {"store": None},
]
"""Of opting out."""


def asks(name: str, seed: int, ways: list[dict[str, Any]]) -> list[Ask]:
    """Requests of every kind: alone, behind a prompt that is stored, sampled, aborted; each with tokens of its own."""
    said = {key.format(name): value.format(name) if isinstance(value, str) else value for key, value in FIELDS.items()}
    kinds: list[dict[str, Any]] = [
        {},
        {"start": SHORT},
        {"samples": 3},
        {"abort_at_step": 20, "count": 60},
        {"count": 60},
    ]
    made: list[Ask] = []
    for number, (kind, way) in enumerate(zip(kinds, itertools.cycle(ways), strict=False)):
        tokens = [*kind.pop("start", ()), *prompt(700 + 10 * number, seed + number)]
        given = {"salt": "" if number == 1 else f"{name}-salt", "name": f"{name}-id-{number}"} | kind
        made.append(Ask(tokens, transfer=said | way, **given))
    return made


def digests(engine: Any, tokens: list[int], salt: str) -> dict[str, list[bytes]]:
    """What names the chunks of a prompt in each place; called in the engine's process, with vLLM's engine."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvtier.keys.object_names import names_of

    heads = get_kv_transfer_group()._worker_side._rank.mover._runner._name_heads
    side = engine.engine_core.engine_core.scheduler.connector._scheduler_side
    scheduler, chain = side.scheduler, side._keys.chain_of(salt, "")
    chain.extend(tokens)
    keys = chain.prefix().keys
    root, recorder = scheduler._log._journal._root, scheduler._log._recorder
    return {
        "key": list(keys),
        "object": names_of([(key, 0) for key in keys], heads),
        "journal": journal_names(keys, root),
        "trace": [str(recorder._named(it)).encode() for it in keys],
    }


def held_tokens(engine: Any) -> list[list[int]]:
    """Tokens of the chunks that the table of events knows; called in the engine's process."""
    side = engine.engine_core.engine_core.scheduler.connector._scheduler_side
    chunks = side.scheduler._log._events._part._chunks.values()
    return [list(chunk.blocks.tokens) for chunk in chunks if chunk.blocks is not None]


def forms(engine: Engine, name: str, requests: list[Ask]) -> dict[str, list[bytes]]:
    """Everything by which one of the requests could be known again, by kind."""
    found: dict[str, list[bytes]] = {"name": [f"{name}-".encode()]}
    for each in requests:
        tokens = own_tokens(each)
        shared = len(each.tokens) - len(tokens)
        of_chunks = engine.do("test_vllm_opt_out:digests", list(each.tokens), each.salt)
        own = {kind: values[shared // CHUNK :] for kind, values in of_chunks.items()}
        hashed = forms_of_digests("key", own["key"]) | forms_of_digests("object", own["object"])
        plain = {"journal": own["journal"], "trace": own["trace"]}
        for kind, values in (forms_of_tokens(tokens) | hashed | plain).items():
            found.setdefault(kind, []).extend(values)
    return found


def told(port: int) -> tuple[bytes, list[dict[str, Any]]]:
    """All events that are not about vLLM's own cache, in JSON; and the blocks that this has stored."""
    every = [event for batch in published(port) for event in msgspec.msgpack.decode(batch)[1]]
    ours = [event for event in every if event.get("medium") not in (None, "GPU")]
    stored = [event for event in every if event["type"] == "BlockStored" and event not in ours]
    return json.dumps(ours, default=bytes.hex).encode(), stored


def own_tokens(each: Ask) -> list[int]:
    """The tokens that only this request has."""
    tokens = list(each.tokens)
    return tokens[len(SHORT) :] if tokens[: len(SHORT)] == SHORT else tokens


def hashes(requests: list[Ask], stored: list[dict[str, Any]]) -> list[bytes]:
    """vLLM's hashes of blocks that begin with tokens of one of the requests."""
    own = map(own_tokens, requests)
    starts = {tuple(tokens[at : at + 5]) for tokens in own for at in range(len(tokens))}
    return [str(it["block_hashes"][0]).encode() for it in stored if tuple(it["token_ids"][:5]) in starts]


def test_nothing_is_left_of_a_request_that_opts_out(start: Start, tmp_path: Path) -> None:
    secret, socket = tmp_path / "secret", tmp_path / "run" / "control"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    settings = connector(
        None,
        store__secret_file=str(secret),
        events__token_ids=True,
        trace__path=str(tmp_path / "trace"),
        journal__path=str(tmp_path / "journal"),
        control__socket=str(socket),
        log__level="debug",
    )
    settings["kv_connector_extra_config"]["tiers"] = [f"{it}:{tmp_path / it}?capacity_bytes=24MiB" for it in TIERS]
    events, port = publisher()
    engine = start("llama", settings, kv_events_config=events)
    engine.ask(SHORT)
    engine.forget()

    hidden, shown = asks("hidden", 100, WAYS), asks("shown", 200, [{"store": True}, {}, envelope(store=True)])
    answers = engine.ask(*hidden)
    assert [it.reason for it in answers] == ["length"] * 3 + ["abort", "length"]
    assert answers[1].cached == whole(len(SHORT))  # it loads what another request has stored
    loaded, until_s = "vllm:kvtier_load_tokens{place=host}", time.monotonic() + 60
    while not engine.metrics()[loaded]:  # vLLM takes metrics in steps, four times a second at most
        assert time.monotonic() < until_s
        time.sleep(0.3)
        engine.drain()
    assert engine.metrics()[loaded] == whole(len(SHORT))
    engine.forget()
    engine.ask(*shown)
    wanted, unwanted = forms(engine, "shown", shown), forms(engine, "hidden", hidden)
    until_s = time.monotonic() + 120
    while "JSON" not in left(wanted, {"": told(port)[0]}).get("", ()):
        assert time.monotonic() < until_s
        engine.drain()  # steps are taken only for events
        time.sleep(0.2)

    said: list[Any] = [ask(socket, "health", {})]
    for each in hidden:
        found = ask(socket, "find", {"tokens": list(each.tokens), "salt": each.salt})
        assert found["hit_tokens"] == (0 if each.salt else whole(len(SHORT)))
        with pytest.raises(ControlError, match="is unknown"):
            ask(socket, "why", {"request": each.name})
    for each in shown:
        found = ask(socket, "find", {"tokens": list(each.tokens), "salt": each.salt})
        assert found["hit_tokens"] >= 2 * CHUNK
        if each.samples == 1:
            said.append(ask(socket, "why", {"request": each.name}))
    events_told, in_gpu = told(port)
    places = {
        "events": events_told,
        "control": json.dumps(said).encode(),
        "memory": json.dumps(engine.do("test_vllm_opt_out:held_tokens")).encode(),
        "metrics": json.dumps(engine.metrics()).encode(),
    }
    for forms_, requests in ((wanted, shown), (unwanted, hidden)):
        forms_["block"] = hashes(requests, in_gpu)
        assert len(forms_["block"]) >= len(requests)  # vLLM's own events have them
    engine.close()
    folders = [tmp_path / it for it in (*TIERS, "trace", "journal")]
    places |= {it.name: contents(it) for it in folders} | {"log": engine.printed().encode()}
    assert left(unwanted, places | {"elsewhere": contents(tmp_path, *folders)}) == {}

    # The control: the same requests without the hint are found in each place that can name a request.
    samples = sum(each.samples for each in shown)
    assert places["trace"].count(b'"input_length"') == places["journal"].count(b'"kind":"request"') == 1 + samples
    heads = _heads([path.read_bytes() for path in (tmp_path / "shared_directory").rglob("*") if path.is_file()])
    assert len(heads) > len(shown)
    assert all(it.metadata.stop - it.metadata.start > 4 * CHUNK for it in heads)  # they have the tokens, sealed
    assert left(wanted, places) == {
        "events": {"JSON", "name", "block"},
        "control": {"name"},
        "memory": {"JSON"},
        "directory": {"object", "object, hex"},
        "disk": {"object"},
        "shared_directory": {"object", "object, hex"},
        "trace": {"trace"},
        "journal": {"journal", "name"},
        "log": {"name"},
    }
