"""Turns the messages of a chat into text, in the form of OpenAI (`role`, `content`) or ShareGPT (`from`, `value`).

A tokenizer.json has no chat template, so all chats are written in one plain form. It preserves shared prefixes.
"""

import json
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, NamedTuple, cast

from kvtier.errors import ConfigError
from kvtier.tools.trace.trace_files import short

_ROLES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model"), "assistant")}
"""OpenAI's names for the roles of ShareGPT."""
_CALLS = ("tool_calls", "function_call")


class Message(NamedTuple):
    """A message of a chat."""

    role: str
    text: str
    other_parts: int = 0
    """Number of parts that are not text, such as images. The text has a short digest in place of each."""


def messages_of(fields: dict[str, Any], name: str) -> list[Message]:
    """Return the messages in the field `name`.

    Raises:
        ConfigError: the field is not a list of messages.
    """
    value = fields[name]
    if not isinstance(value, list):
        raise ConfigError(f"{name} is {short(value)}; allowed: a list of messages")
    return [_message(it, name) for it in cast("list[object]", value)]


def chat_text(messages: Iterable[Message]) -> str:
    """Return the prompt of a chat as text. The chat's next prompt, with the answer and new messages, begins with it."""
    return "".join(f"<{role}>\n{text}\n" for role, text, _ in messages) + "<assistant>\n"


def _message(value: object, name: str) -> Message:
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else dict[str, Any]()
    role = fields.get("role", fields.get("from"))
    if not isinstance(role, str):
        raise ConfigError(f"{name} holds {short(cast('object', value))}; allowed: objects with role and content")
    content: Any = fields.get("content", fields.get("value"))
    texts: list[str] = []
    other_parts = 0
    for part in cast("list[object]", content if isinstance(content, list) else [content or ""]):
        match part:
            case str(text) | {"text": str(text)}:
                texts.append(text)
            case {"type": str(kind)}:
                other_parts += 1
                texts.append(f"<{kind} {blake2b(json.dumps(part).encode(), digest_size=8).hexdigest()}>")
            case _:
                raise ConfigError(f"{name} holds content {short(part)}; allowed: text, or parts with a type")
    texts += [json.dumps(fields[it]) for it in _CALLS if fields.get(it)]
    return Message(_ROLES.get(role, role), "".join(texts), other_parts)
