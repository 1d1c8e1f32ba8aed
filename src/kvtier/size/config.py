"""A config.json as it is read: every field that is used is noted, every field that is wrong is named."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from kvtier.errors import ConfigError

FILE_BYTES_MAX = 16 << 20
DIM_MAX = 1 << 24
LAYERS_MAX = 4096

OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "max_position_embeddings": ("n_positions", "model_max_length"),
}
"""What older configurations call the same."""

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Where models that also see or hear keep the part that speaks."""


class Config:
    """The fields of one model.

    Args:
        values: what the JSON object holds.
        origin: where it came from, for messages.
    """

    def __init__(self, values: Mapping[str, object], origin: str) -> None:
        self.values, self.origin = values, origin
        self.used: dict[str, object] = {}
        """Fields that were asked for and were there, by name; those of an object within are ``object.field``."""
        self._prefix = ""

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self._find(key)[1] is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = DIM_MAX) -> int:
        """The whole number `key`, or `default` where it is missing or null.

        Raises:
            ConfigError: it is missing without a default, no whole number, or not in `least` to `most`.
        """
        value = self._get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.origin}: {key} is missing; it must be a whole number from {least} to {most}")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"it must be a whole number from {least} to {most}")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """The truth value `key`.

        Raises:
            ConfigError: it is something else.
        """
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        """The text `key`.

        Raises:
            ConfigError: it is something else.
        """
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "it must be a text")
        return value

    def texts(self, key: str) -> list[str] | None:
        """The list of texts `key`; None where it is missing or null.

        Raises:
            ConfigError: it is something else.
        """
        items = self._items(key)
        if items is not None and not all(isinstance(item, str) for item in items):
            raise self.wrong(key, "it must be a list of texts")
        return cast("list[str] | None", items)

    def integers(self, key: str) -> list[int] | None:
        """The list of whole numbers `key`, none below 0; None where it is missing or null.

        Raises:
            ConfigError: it is something else.
        """
        items = self._items(key)
        if items is not None and not all(type(item) is int and 0 <= item <= DIM_MAX for item in items):
            raise self.wrong(key, "it must be a list of whole numbers")
        return cast("list[int] | None", items)

    def objects(self, key: str) -> list["Config"] | None:
        """The list of objects `key`; None where it is missing or null.

        Raises:
            ConfigError: it is something else.
        """
        items = self._items(key)
        if items is None:
            return None
        if not all(isinstance(item, dict) for item in items):
            raise self.wrong(key, "it must be a list of objects")
        return [
            Config(cast("dict[str, object]", item), f"{self.origin}: {key}[{place}]")
            for place, item in enumerate(items)
        ]

    def child(self, key: str) -> "Config":
        """The object `key`; what is used of it is noted here too.

        Raises:
            ConfigError: it is missing or something else.
        """
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise ConfigError(f"{self.origin}: {key} must be an object, got {_short(value)}")
        inner = Config(cast("dict[str, object]", value), f"{self.origin}: {key}")
        inner.used = self.used
        inner._prefix = "" if key in TEXT_PARTS else f"{key}."
        return inner

    def changed(self, changes: object, told: str) -> "Config":
        """This configuration with the fields of the object `changes` in place of its own.

        Raises:
            ConfigError: `changes`, which `told` names, is no object.
        """
        if not isinstance(changes, dict):
            raise ConfigError(f"{self.origin}: {told} must be an object, got {_short(changes)}")
        other = Config(
            {**self.values, **cast("dict[str, object]", changes)}, f"{self.origin}: {told}" if changes else self.origin
        )
        other.used, other._prefix = self.used, self._prefix
        return other

    def wrong(self, key: str, why: str) -> ConfigError:
        """The error that says that `key` is wrong and why."""
        return ConfigError(f"{self.origin}: {key} is {_short(self._find(key)[1])}; {why}")

    def _get(self, key: str) -> object:
        name, value = self._find(key)
        if value is not None:
            self.used[self._prefix + name] = value
        return value

    def _find(self, key: str) -> tuple[str, object]:
        """The name that `key` has here, and its value; None where it is missing or null."""
        for name in (key, *OTHER_NAMES.get(key, ())):
            if self.values.get(name) is not None:
                return name, self.values[name]
        return key, None

    def _items(self, key: str) -> list[object] | None:
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(key, "it must be a list")
        items = cast("list[object]", value)
        if len(items) > LAYERS_MAX:
            raise ConfigError(f"{self.origin}: {key} has {len(items)} entries; at most {LAYERS_MAX} are allowed")
        return items


def load(path: Path) -> Config:
    """Read a config.json, or the one in a folder; of a model with several parts, the part that speaks.

    Raises:
        ConfigError: there is none, or it is not a model's configuration.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}; it must be a config.json or its folder") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{file}: more than {FILE_BYTES_MAX} bytes; that is no config.json")
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: it must be a JSON object, got {_short(values)}")
    return speaking_part(Config(cast("dict[str, object]", values), str(file)))


def speaking_part(config: Config) -> Config:
    """The part of `config` that describes the language model: itself, or one of `TEXT_PARTS`."""
    nested = next((part for part in TEXT_PARTS if isinstance(config.values.get(part), dict)), None)
    return config if nested is None or config.has("num_hidden_layers") else config.child(nested)


def _short(value: object) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
