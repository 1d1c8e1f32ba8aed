"""Hints of one vLLM request: `kv_transfer_params`, and the envelope `kv_hints` of vLLM 0.33.

    session, next_turn   the name of the conversation, and the hint at its next turn. The name is scoped to its
                         `cache_salt`, so one tenant cannot name another tenant's conversation
    priority             low: evicted first after the request's end; high: retained, and outlasts other retentions
    retain_s             the request's KV stays in host memory for this many seconds after its end
    prefetch_in_s        the request's KV is in host memory this many seconds after its end, and may leave it until then
    store, load          false: nothing of the request is stored, or nothing is loaded for it
    max_offload_tokens, max_load_tokens
                         vLLM's own fields: only so many leading tokens are stored, or loaded. 0 is as false above

`KvHintsEnvelope` (`vllm.v1.kv_hints` of 0.33) lists actions of a type, a version and a payload. An action of the type
`kvtier.hints`, version 1, has the fields above as payload. Dynamo passes an envelope as `kv_transfer_params.kv_hint`.
A field of `kv_transfer_params` counts more than one of an envelope.

Hints never affect correctness. An invalid one is ignored.
"""

from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from reprlib import repr as short
from typing import Any, NamedTuple, TypeVar, cast

from kvtier.connect.vllm.vllm_types import Request
from kvtier.types import NextTurn

ACTION_TYPE, ACTION_VERSION = "kvtier.hints", "1"
"""Action of an envelope whose payload kvtier reads. Of its version only the part before the dot counts."""

HINTS = frozenset(
    {
        *("session", "next_turn", "priority", "retain_s", "prefetch_in_s", "store", "load"),
        *("max_load_tokens", "max_offload_tokens"),
    }
)
"""Fields of `kv_transfer_params` that are hints."""

ENVELOPE = "kv_hint"

_ACTIONS_MAX = 64
_SECONDS_MAX = 1e9
"""Longer durations are mistakes. The settings allow less."""
_CONVERSATION_BYTES = 16
_NEXT_TURNS = {turn.value: turn for turn in NextTurn}
_PRIORITIES = ("low", "normal", "high")
_Value = TypeVar("_Value")


class ConversationHint(NamedTuple):
    """A request's conversation, and the expected source of its next turn."""

    conversation: str | None = None
    """Digest of `cache_salt` and the client's name."""
    next_turn: NextTurn | None = None
    """Always None without a conversation."""


class RequestHints(NamedTuple):
    """What a request wants kvtier to do with its KV, besides the conversation."""

    priority: str = "normal"
    retain_s: float | None = None
    prefetch_in_s: float | None = None
    max_load_tokens: int | None = None
    """Tokens beyond vLLM's own cache; 0: none."""
    max_offload_tokens: int | None = None
    """Leading tokens; 0: none."""


NO_HINTS = RequestHints()


class Problem(NamedTuple):
    """A hint that is ignored."""

    field: str
    text: str


def params_of(request: Request) -> dict[str, object]:
    """`kv_transfer_params`, or nothing."""
    params: Any = request.kv_transfer_params
    return cast("dict[str, object]", params) if isinstance(params, dict) else {}


def problem(field_name: str, value: object, allowed: str) -> str:
    """What is invalid and what is allowed, in a short sentence."""
    return f"{field_name} = {_shown(value)}; allowed: {allowed}"


def _shown(value: object) -> str:
    try:
        return short(value)
    except (ValueError, RecursionError):  # an integer with too many digits, or lists nested too deeply
        return f"a value of type {type(value).__name__}"


def conversation_hint(request: Request) -> tuple[ConversationHint, str]:
    """Read `session_id`, or `session` and `next_turn`; also what is invalid, or ``""``."""
    fields = _fields(request)
    next_turn, given = fields.get("next_turn"), fields.get("session")
    if given is None:
        given = cast("object", getattr(request, "session_id", None))
    if given is None:
        allowed = "only together with session or session_id"
        return ConversationHint(), "" if next_turn is None else problem("next_turn", next_turn, allowed)
    if not isinstance(given, str) or not given:
        return ConversationHint(), problem("session", given, "a non-empty string")
    name = _scoped_name(request.cache_salt or "", given)
    known = _NEXT_TURNS.get(next_turn) if isinstance(next_turn, str) else None
    if known is None and next_turn is not None:
        return ConversationHint(name), problem("next_turn", next_turn, ", ".join(map(repr, _NEXT_TURNS)))
    return ConversationHint(name, known), ""


def request_hints(request: Request) -> tuple[RequestHints, list[Problem]]:
    """Read the other hints; also those that are invalid."""
    fields, problems = _fields(request), list[Problem]()

    def read(name: str, kind: type[_Value], allowed: str, is_allowed: Callable[[_Value], bool]) -> _Value | None:
        value = fields.get(name)
        if value is None:
            return None
        is_kind = isinstance(value, kind) and isinstance(value, bool) is (kind is bool)
        if not is_kind or not is_allowed(cast("_Value", value)):
            problems.append(Problem(name, problem(name, value, allowed)))
            return None
        return cast("_Value", value)

    def seconds(name: str) -> float | None:
        value = read(name, cast("type[float]", int | float), "seconds, 0 to 1e9", _is_duration)
        return None if value is None else float(value)

    def tokens(name: str, switch: str) -> int | None:
        most = read(name, int, "a number of tokens, 0 or more", lambda value: value >= 0)
        is_wanted = read(switch, bool, "true, false", lambda _value: True)
        return 0 if is_wanted is False else most

    priority = read("priority", str, ", ".join(map(repr, _PRIORITIES)), lambda value: value in _PRIORITIES)
    hints = RequestHints(
        priority or "normal",
        seconds("retain_s"),
        seconds("prefetch_in_s"),
        tokens("max_load_tokens", "load"),
        tokens("max_offload_tokens", "store"),
    )
    return hints, problems


def unknown_hints(request: Request) -> str:
    """Actions of envelopes, and fields of their payloads, that kvtier does not know, in a sentence; or ``""``."""
    found: list[str] = []
    for name, action_type, version, payload in _actions(request):
        if payload is None:
            found.append(f"{name} has the action {_shown(action_type)} {_shown(version)}")
        else:
            found += [f"{name} has {_shown(field)}" for field in payload if field not in HINTS]
    known = f"the action {ACTION_TYPE} {ACTION_VERSION} with {', '.join(sorted(HINTS))}"
    return f"{found[0]}; known: {known}" if found else ""


def _is_duration(value: float) -> bool:
    return 0 <= value <= _SECONDS_MAX


def _fields(request: Request) -> dict[str, object]:
    """All hints of a request. The first value counts, in the order of `_actions` after `kv_transfer_params`."""
    params = params_of(request)
    fields = {name: params[name] for name in HINTS if params.get(name) is not None}
    for *_, payload in _actions(request):
        for name, value in payload.items() if payload is not None else ():
            if name in HINTS and value is not None:
                fields.setdefault(name, value)
    return fields


def _actions(request: Request) -> Iterator[tuple[str, object, object, Mapping[str, object] | None]]:
    """Name of the envelope, type, version and payload of its first `_ACTIONS_MAX` actions; None: not for kvtier."""
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


def _part(value: object, name: str) -> object:
    """A field of vLLM's struct, or of the same as JSON."""
    return cast("dict[str, object]", value).get(name) if isinstance(value, dict) else getattr(value, name, None)


def _scoped_name(salt: str, conversation: str) -> str:
    digest = blake2b(digest_size=_CONVERSATION_BYTES)
    for text in (salt, conversation):
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
