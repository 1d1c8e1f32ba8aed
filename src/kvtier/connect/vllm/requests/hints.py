"""Reads the hints of one vLLM request: `kv_transfer_params`, and the envelope `kv_hints` of vLLM 0.33.

    session, next_turn   name the conversation, and where its next turn comes from. The name is scoped to the request's
                         `cache_salt`, so one tenant cannot name another tenant's conversation
    priority             low: evicted first after the request's end; high: retained, and outlasts other retentions
    retain_s             the request's KV stays in host memory for this many seconds after its end
    prefetch_in_s        the request's KV is back in host memory this many seconds after its end
    store, load          if false, nothing of the request is stored, or nothing is loaded for it
    max_offload_tokens, max_load_tokens
                         vLLM's own fields: store at most this many leading tokens, and load at most this many tokens
                         beyond those in vLLM's own cache. 0 acts like false above

A request *opts out* with `store` false or `max_offload_tokens` 0, in any source of hints. Then no tier, host memory,
event, journal, trace, history, announcement or log line gets its tokens, keys or names. Its other hints, except
`load`, have no effect. It may load what others have stored. vLLM's own prefix cache and events are not
affected. A later request with the same tokens that does not opt out stores them as its own.

`KvHintsEnvelope` (`vllm.v1.kv_hints` of 0.33) lists actions, each with a type, a version and a payload. The payload of
an action of type `kvtier.hints`, version 1, has the fields above. Dynamo passes an envelope as
`kv_transfer_params.kv_hint`. A field of `kv_transfer_params` takes precedence over an envelope's.

vLLM 0.32 passes nothing from the client to the requests of a beam search, so they opt out.

Hints never affect correctness. An invalid hint is ignored, with one exception: a request opts out if there is
doubt about `store`, `max_offload_tokens`, or anything that may have contained them.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from reprlib import repr as short
from typing import Any, NamedTuple, cast

from kvtier.connect.vllm.vllm_types import Request
from kvtier.types import NextTurn

ACTION_TYPE, ACTION_VERSION = "kvtier.hints", "1"
"""Type and version of the actions whose payload kvtier reads. Of a version, only the part before the dot counts."""

ENVELOPE = "kv_hint"

_ACTIONS_MAX = 64
_SECONDS_MAX = 1e9
"""Maximum duration of a hint. Longer durations are mistakes, and the settings allow less."""
_CONVERSATION_BYTES = 16


_BEAM = re.compile(r"-beam-\d+(-[0-9a-f]{8})?\Z")
"""End of the ids of vLLM's requests for a beam search."""

_Rule = tuple[str, Callable[[object], bool]]
"""The allowed values of a field, as text and as a test."""


def _one_of(values: Collection[str]) -> _Rule:
    return ", ".join(map(repr, values)), lambda it: isinstance(it, str) and it in values


def _number(what: str, kind: type[float], most: float = math.inf) -> _Rule:
    return what, lambda it: isinstance(it, kind) and not isinstance(it, bool) and 0 <= it <= most


_SECONDS = _number("a number of seconds, 0 to 1e9", cast("type[float]", int | float), _SECONDS_MAX)
_TOKENS = _number("a number of tokens, 0 or more", int)
_SWITCH: _Rule = ("true, false", lambda it: isinstance(it, bool))
_RULES: dict[str, _Rule] = {
    "session": ("a non-empty string", lambda it: isinstance(it, str) and it != ""),
    "next_turn": _one_of([it.value for it in NextTurn]),
    "priority": _one_of(["low", "normal", "high"]),
    "retain_s": _SECONDS,
    "prefetch_in_s": _SECONDS,
    "store": _SWITCH,
    "load": _SWITCH,
    "max_load_tokens": _TOKENS,
    "max_offload_tokens": _TOKENS,
}

HINTS = frozenset(_RULES)
"""Fields of `kv_transfer_params` that are hints."""


class RequestHints(NamedTuple):
    """What a request wants kvtier to do with its KV."""

    conversation: str | None = None
    """Digest of `cache_salt` and the client's name for the conversation."""
    next_turn: NextTurn | None = None
    """The expected source of the conversation's next turn. Always None without a conversation."""
    priority: str = "normal"
    retain_s: float | None = None
    prefetch_in_s: float | None = None
    max_load_tokens: int | None = None
    """Maximum number of tokens to load beyond vLLM's own cache, 0 for none."""
    max_offload_tokens: int | None = None
    """Maximum number of leading tokens to store, 0 for none."""

    @property
    def opt_out(self) -> bool:
        """Whether nothing of the request may be kept."""
        return self.max_offload_tokens == 0

    @property
    def concern_the_end(self) -> bool:
        """Whether any hint except `next_turn` asks for something after the request has ended."""
        return (self.priority, self.retain_s, self.prefetch_in_s) != ("normal", None, None)


NO_HINTS = RequestHints()
OPTED_OUT = RequestHints(max_offload_tokens=0)
"""The hints of a request that opts out, or whose hints cannot be read."""


class HintProblem(NamedTuple):
    """A hint that is ignored."""

    field: str
    text: str


def params_of(request: Request) -> dict[str, object]:
    """Return `kv_transfer_params`, or an empty dict."""
    params: Any = request.kv_transfer_params
    return cast("dict[str, object]", params) if isinstance(params, dict) else {}


def problem(field_name: str, value: object, allowed: str) -> str:
    """Return what is invalid and what is allowed, in a short sentence."""
    return f"{field_name} = {_shown(value)}; allowed: {allowed}"


def _shown(value: object) -> str:
    try:
        return short(value)
    except (ValueError, RecursionError):  # an integer with too many digits, or lists nested too deeply
        return f"a value of type {type(value).__name__}"


def request_hints(request: Request) -> tuple[RequestHints, list[HintProblem]]:
    """Return the hints of a request, and the invalid ones. Problems of a request that opts out show no value."""
    given, doubt = _fields(request)
    rules = ((name, value, *_RULES[name]) for name, value in given.items())
    wrong = {name: allowed for name, value, allowed, is_kept_by in rules if not is_kept_by(value)}
    kept: Mapping[str, Any] = {name: value for name, value in given.items() if name not in wrong}
    max_load_tokens = kept.get("max_load_tokens") if kept.get("load", True) else 0
    if doubt or any(_opts_out(*it) for it in given.items()):
        kinds = {name: f"{name} is of type {type(given[name]).__name__}; allowed: {it}" for name, it in wrong.items()}
        texts = {"": doubt} | kinds if doubt else kinds
        return OPTED_OUT._replace(max_load_tokens=max_load_tokens), [HintProblem(*it) for it in texts.items()]
    named = "session" in kept
    if "next_turn" in given and "session" not in given:
        wrong["next_turn"] = "a value together with session or session_id"
    hints = RequestHints(
        _scoped_name(request.cache_salt or "", kept["session"]) if named else None,
        NextTurn(kept["next_turn"]) if named and "next_turn" in kept else None,
        kept.get("priority", "normal"),
        kept.get("retain_s"),
        kept.get("prefetch_in_s"),
        max_load_tokens,
        kept.get("max_offload_tokens"),
    )
    return hints, [HintProblem(name, problem(name, given[name], allowed)) for name, allowed in wrong.items()]


def safe_hints(request: Request) -> RequestHints:
    """Return the hints of a request. Never raises: a request whose hints cannot be read opts out."""
    try:
        return request_hints(request)[0]
    except Exception:  # noqa: BLE001 - whatever a client has sent
        return OPTED_OUT


def opts_out(request: Request) -> bool:
    """Return whether nothing of a request may be kept. Never raises."""
    return safe_hints(request).opt_out


def _opts_out(name: str, value: object) -> bool:
    """Return whether one value opts out, readable or not."""
    if name == "max_offload_tokens":
        return not (value is None or (_RULES[name][1](value) and value))
    return name == "store" and value is not True


def unknown_hints(request: Request) -> str:
    """Return a sentence about actions, or fields of their payloads, that kvtier does not know; else ``""``."""
    found: list[str] = []
    for name, action_type, version, payload in _actions(request):
        if payload is None:
            found.append(f"{name} has the action {_shown(action_type)} {_shown(version)}")
        else:
            found += [f"{name} has {_shown(field)}" for field in payload if field not in HINTS]
    known = f"the action {ACTION_TYPE} {ACTION_VERSION} with {', '.join(sorted(HINTS))}"
    return f"{found[0]}; known: {known}" if found else ""


def _fields(request: Request) -> tuple[dict[str, object], str]:
    """Return all hints of a request, and why others may not have been read, or ``""``.

    The first value counts, in this order: `kv_transfer_params`, `_actions`, `session_id`. But any value that opts out
    overrides the first.
    """
    fields: dict[str, object] = {}
    params, doubt = params_of(request), ""
    if (given := cast("object", request.kv_transfer_params)) is not None and given is not params:
        doubt = f"kv_transfer_params is of type {type(given).__name__}; allowed: a JSON object"
    if given is None and _BEAM.search(request.request_id):
        doubt = "vLLM passes no hints on to the requests of a beam search"
    said = [(name, params[name]) for name in HINTS if name in params]
    for name, kind, _, payload in _actions(request):
        said += [(field, value) for field, value in (payload or {}).items() if field in HINTS]
        if payload is None and (not isinstance(kind, str) or kind == ACTION_TYPE):
            doubt = (
                f"{name} cannot be read; allowed: up to {_ACTIONS_MAX} actions, such as {ACTION_TYPE} {ACTION_VERSION}"
            )
    for name, value in said:
        if _opts_out(name, value):
            fields[name] = value
        elif value is not None:
            fields.setdefault(name, value)
    if (session := cast("object", getattr(request, "session_id", None))) is not None:
        fields.setdefault("session", session)
    return fields, doubt


def _actions(request: Request) -> Iterator[tuple[str, object, object, Mapping[str, object] | None]]:
    """Yield (envelope, type, version, payload) of the first `_ACTIONS_MAX` actions.

    The payload is None for an action that is not kvtier's. The type is None for what is not read: an envelope without
    a list, or further actions.
    """
    envelopes = (
        (ENVELOPE, params_of(request).get(ENVELOPE)),
        ("kv_hints", cast("object", getattr(request, "kv_hints", None))),
    )
    for name, envelope in envelopes:
        actions = _part(envelope, "actions")
        listed = cast("list[object]", actions) if isinstance(actions, list) else []
        for action in islice(listed, _ACTIONS_MAX):
            kind, version = _part(action, "action_type"), _part(action, "action_version")
            payload = _part(action, "payload")
            is_ours = kind == ACTION_TYPE and isinstance(version, str) and version.partition(".")[0] == ACTION_VERSION
            yield name, kind, version, cast("Any", payload) if is_ours and isinstance(payload, dict) else None
        if envelope is not None and (not isinstance(actions, list) or len(listed) > _ACTIONS_MAX):
            yield name, None, None, None


def _part(value: object, name: str) -> object:
    """Return a field of vLLM's struct, or of the same struct as JSON."""
    return cast("dict[str, object]", value).get(name) if isinstance(value, dict) else getattr(value, name, None)


def _scoped_name(salt: str, conversation: str) -> str:
    digest = blake2b(digest_size=_CONVERSATION_BYTES)
    for text in (salt, conversation):
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
