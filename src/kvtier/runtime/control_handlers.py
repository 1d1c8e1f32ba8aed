"""The calls that an engine answers on its control socket. Each checks its arguments and returns plain data.

    find      where the chunks of a prompt are, how many tokens a request would load, and what ends the run
    why       why a request loaded nothing or little, and where its prompt diverges from an earlier one
    prefetch  loads a prompt's chunks from lower tiers into host memory
    pin       keeps a prompt in host memory for a given time; unpin releases it
    clear     makes cached KV unreachable for this engine, and frees host memory
    health    whether kvtier works, and the reason if it does not

The engine's connector provides what only it knows: the keys of a prompt, the requests, and how keys change. Answers
contain counts, tier names and request ids, but no keys, salts or secrets. Only `why` shows tokens: a few where two
prompts diverge, and never those of a request that opts out.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, cast

from kvtier.core.survey import CHUNKS_MAX, Survey
from kvtier.keys.chain import Chain
from kvtier.runtime.control_socket import ControlError
from kvtier.runtime.session import Session
from kvtier.types import Prefix, Priority, RequestId

TEXT_CHARACTERS_MAX: Final = 4096
RESERVE_S: Final = 0.2
"""The part of a call's time reserved for the work after the tiers have answered."""

POLL_S: Final = 0.02
"""Interval at which a call checks whether its prefetch has arrived."""
PROMPT: Final = ("tokens", "salt", "adapter")

OFFLINE: Final = (
    "an engine cannot select its objects by model or age; allowed here: all or salt. To remove objects of a store "
    "by model and age, run kvtier inspect free STORE --model ID --age SECONDS"
)


class EngineCalls(NamedTuple):
    """The functions that an engine's connector, such as `connect.vllm`, provides to `Control`.

    They may be called from any thread.
    """

    chain: Callable[[str, str], Chain]
    """(salt, adapter) -> the empty key chain of a request. Raises a `KvError` for an unknown adapter."""
    hit_tokens: Callable[[int], int]
    """Takes the number of tokens in a prompt, and returns how many of them can be loaded at most."""
    clear: Callable[[str | None], None]
    """Gives later requests with this salt new keys; ``""`` means requests without one, and None all requests."""
    problem: Callable[[], str]
    """Returns why the connector neither loads nor stores; empty in normal operation."""
    why: Callable[[str], dict[str, Any]] | None = None
    """Returns what happened to a request, or raises `ControlError` for an unknown one. None without a history."""
    note: str = ""
    """Describes what clearing does not reach in this engine."""


class Control:
    """Answers calls, as a `control_socket.Answer`.

    Args:
        session: the engine's session.
        engine: the functions of the engine's connector.
        retain_s: longest duration of a pin (`limits.retain_s`).
    """

    def __init__(self, session: Session, engine: EngineCalls, retain_s: float) -> None:
        self._session = session
        self._engine = engine
        self._retain_s = retain_s
        self._numbers = itertools.count()
        self._began_s = time.monotonic()
        self._commands: dict[str, tuple[Callable[[Mapping[str, Any], float], dict[str, Any]], tuple[str, ...]]] = {
            "find": (self._find, PROMPT),
            "why": (self._why, ("request",)),
            "prefetch": (self._prefetch, PROMPT),
            "pin": (self._pin, (*PROMPT, "seconds")),
            "unpin": (self._unpin, PROMPT),
            "clear": (self._clear, ("all", "salt")),
            "health": (self._health, ()),
        }
        """For each command, the method that answers it and the names of its arguments."""

    def answer(self, command: str, arguments: dict[str, Any], until_s: float) -> dict[str, Any]:
        """Answer a call.

        Raises:
            ControlError: the command or an argument is invalid, or the session cannot take the call.
        """
        if command not in self._commands:
            raise ControlError(f"command {command[:40]!r} is unknown; allowed: {', '.join(self._commands)}")
        call, names = self._commands[command]
        if command == "clear" and {"model", "age"} & arguments.keys():
            raise ControlError(OFFLINE)
        if unknown := sorted(arguments.keys() - {*names}):
            raise ControlError(f"arguments {unknown} are unknown; allowed: {', '.join(names) or 'none'}")
        return call(arguments, until_s)

    # ---- commands --------------------------------------------------------------------------------------------------

    def _find(self, arguments: Mapping[str, Any], until_s: float) -> dict[str, Any]:
        tokens, prefix = self._prompt(arguments)
        survey = self._survey(prefix, until_s)
        most = self._engine.hit_tokens(tokens)
        problem = self._engine.problem()
        hit_tokens = 0 if problem else survey.tokens_within(most)
        return {
            "tokens": tokens,
            "chunk_tokens": survey.prefix.chunk_tokens,
            "hit_tokens": hit_tokens,
            "end": f"nothing is loaded: {problem}" if problem else _end(survey, tokens, hit_tokens, most),
            "ranges": _ranges(survey),
            "silent": survey.silent,
        }

    def _prefetch(self, arguments: Mapping[str, Any], until_s: float) -> dict[str, Any]:
        tokens, prefix = self._prompt(arguments)
        return {"tokens": tokens, **self._fetched(prefix, until_s)}

    def _pin(self, arguments: Mapping[str, Any], until_s: float) -> dict[str, Any]:
        seconds: Any = arguments.get("seconds")
        if type(seconds) not in {int, float} or not 0 < seconds <= self._retain_s:
            raise ControlError(
                f"seconds = {str(seconds)[:40]}; allowed: above 0, up to limits.retain_s = {self._retain_s:g}"
            )
        tokens, prefix = self._prompt(arguments)
        fetched = self._fetched(prefix, until_s)
        self._session.retain(prefix, seconds, Priority.OPERATOR)
        pinned_tokens = self._session.host_tokens(prefix, is_retained=True)
        return {"tokens": tokens, **fetched, "pinned_tokens": pinned_tokens, "seconds": seconds}

    def _unpin(self, arguments: Mapping[str, Any], _until_s: float) -> dict[str, Any]:
        tokens, prefix = self._prompt(arguments)
        pinned_tokens = self._session.host_tokens(prefix, is_retained=True)
        self._session.end_retention(prefix)
        return {"tokens": tokens, "unpinned_tokens": pinned_tokens}

    def _fetched(self, prefix: Prefix, until_s: float) -> dict[str, int]:
        """Load the stored chunks of `prefix` into host memory, and stop waiting when the call's time is over.

        Raises:
            ControlError: the connector currently loads nothing.
        """
        if problem := self._engine.problem():
            raise ControlError(f"nothing is loaded into host memory: {problem}")
        stored_tokens = self._survey(prefix, until_s).tokens
        in_host = self._session.host_tokens(prefix)
        if in_host < stored_tokens:
            name = RequestId(f"prefetch {next(self._numbers)}")
            self._session.prefetch(name, prefix, wait_s=until_s - time.monotonic(), priority=Priority.OPERATOR)
            while in_host < stored_tokens and time.monotonic() < until_s - RESERVE_S:
                time.sleep(POLL_S)
                in_host = self._session.host_tokens(prefix)
        return {"stored_tokens": stored_tokens, "host_tokens": in_host}

    def _survey(self, prefix: Prefix, until_s: float) -> Survey:
        survey = self._session.survey(prefix, max(0.0, until_s - time.monotonic() - RESERVE_S))
        if survey is None:
            raise ControlError(f"nothing can be found: {self._session.obstacle or 'the session is closed'}")
        return survey

    def _prompt(self, arguments: Mapping[str, Any]) -> tuple[int, Prefix]:
        """Return the number of tokens in a prompt, and its full chunks."""
        tokens = arguments.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ControlError("tokens must be a list of at least one token id")
        ids = cast("list[int]", tokens)
        chain = self._engine.chain(_text(arguments, "salt"), _text(arguments, "adapter"))
        try:
            chain.extend(ids)
        except ValueError as error:
            raise ControlError(str(error)) from None
        return len(ids), chain.prefix()

    def _why(self, arguments: Mapping[str, Any], _until_s: float) -> dict[str, Any]:
        name = _text(arguments, "request")
        if not name:
            raise ControlError("request must be the id of a request")
        if self._engine.why is None:
            raise ControlError("this engine keeps no history of its requests; use find instead")
        return self._engine.why(name)

    def _clear(self, arguments: Mapping[str, Any], _until_s: float) -> dict[str, Any]:
        is_all = arguments.get("all", False)
        if not isinstance(is_all, bool) or is_all is ("salt" in arguments):
            raise ControlError(
                "clear needs either all = true or a salt; the salt '' stands for requests without a salt"
            )
        salt = None if is_all else _text(arguments, "salt")
        self._engine.clear(salt)
        freed, kept = self._session.clear() if is_all else (0, 0)
        tiers = ", ".join(self._session.tier_faults())
        notes = [f"objects in {tiers} are kept, but this engine does not find them until its restart"] if tiers else []
        return {"freed_objects": freed, "kept_objects": kept, "notes": [*notes, *filter(None, [self._engine.note])]}

    def _health(self, _arguments: Mapping[str, Any], _until_s: float) -> dict[str, Any]:
        problem = self._engine.problem() or self._session.obstacle
        is_live = self._session.is_alive
        return {
            "live": is_live,
            "ready": is_live and not problem,
            "problem": problem or ("" if is_live else "the session's thread does not run"),
            "up_s": round(time.monotonic() - self._began_s, 3),
            "tiers": {name: tier._asdict() for name, tier in self._session.tier_faults().items()},
        }


def _ranges(survey: Survey) -> list[dict[str, Any]]:
    """Return the places of all chunks, with adjacent chunks that are stored in the same places merged."""
    size, found = survey.prefix.chunk_tokens, list[dict[str, Any]]()
    for chunk in range(len(survey.prefix.keys)):
        places = survey.places(chunk)
        if found and found[-1]["places"] == places:
            found[-1]["to"] += size
        else:
            found.append({"from": chunk * size, "to": (chunk + 1) * size, "places": places})
    return found


def _end(survey: Survey, tokens: int, hit_tokens: int, most: int) -> str:
    """Describe what ends the run of tokens that can be loaded."""
    size = survey.prefix.chunk_tokens
    if tokens < size:
        return f"the prompt has no full chunk; a chunk has {size} tokens"
    if hit_tokens >= most:
        return "the prompt ends; its last token, and the tokens after its last full chunk, are always computed"
    if survey.prefix.tokens < most and hit_tokens == survey.prefix.tokens:
        return f"only the first {CHUNKS_MAX} chunks are looked up"
    chunk = survey.history_chunks
    if chunk * size > hit_tokens:
        return "no later boundary at which the model's windows or states can resume is stored"
    parts = [f"nothing holds the chunk at token {chunk * size}"]
    if chunk < len(survey.prefix.keys) and survey.places(chunk):
        parts = [f"the chunk at token {chunk * size} is not complete anywhere"]
    if survey.has_left(chunk):
        parts.append("it has left host memory recently")
    parts += [f"tier {tier} {reason}" for tier, reason in survey.silent.items()]
    return "; ".join(parts)


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name, "")
    # JSON allows half of a surrogate pair; UTF-8 does not.
    is_text = isinstance(value, str) and value.encode(errors="replace").decode() == value
    if not is_text or len(value) > TEXT_CHARACTERS_MAX:
        raise ControlError(f"{name} must be a string of at most {TEXT_CHARACTERS_MAX} characters")
    return value
