"""A model's config.json: typed access to its fields, a record of those used, and errors that name the field."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar, cast

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
"""Older names of the same fields."""

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Fields in which multimodal models keep the language model's configuration."""

_Value = TypeVar("_Value")


class ModelConfig:
    """The fields of one model. A field that is null counts as missing.

    Args:
        values: the JSON object.
        origin: file or name, for error messages.
    """

    def __init__(self, values: Mapping[str, object], origin: str) -> None:
        self.values, self.origin = values, origin
        self.used: dict[str, object] = {}
        """Fields that were read, by name; those of a nested object are ``object.field``."""
        self.notes: list[str] = []
        """Remarks of the family's reader about the sizes."""
        self._prefix = ""

    def has(self, key: str) -> bool:
        """Whether `key` is there."""
        return self._find(key)[1] is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = DIM_MAX) -> int:
        """The whole number `key`, or `default` where it is missing.

        Raises:
            ConfigError: it is missing without a default, not a whole number, or not in `least` to `most`.
        """
        value = self._get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.origin}: {key} is missing; it must be a whole number from {least} to {most}")
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, f"it must be a whole number from {least} to {most}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """The whole number `key`, or None where it is missing."""
        return self.integer(key) if self.has(key) else None

    def flag(self, key: str, *, default: bool = False) -> bool:
        """The truth value `key`."""
        value = self._typed(key, bool, "true or false")
        return default if value is None else value

    def text(self, key: str, default: str = "") -> str:
        """The text `key`."""
        return self._typed(key, str, "a text") or default

    def texts(self, key: str) -> list[str] | None:
        """The list of texts `key`; None where it is missing."""
        return self._list(key, str, "texts")

    def integers(self, key: str) -> list[int] | None:
        """The list of whole numbers `key`, none below 0; None where it is missing."""
        items = self._list(key, int, "whole numbers")
        if not all(0 <= item <= DIM_MAX for item in items or ()):
            raise self.wrong(key, "it must be a list of whole numbers")
        return items

    def objects(self, key: str) -> list["ModelConfig"]:
        """The objects of the list `key`; none where it is missing."""
        items = cast("list[dict[str, object]] | None", self._list(key, dict, "objects"))
        return [ModelConfig(item, f"{self.origin}: {key}[{index}]") for index, item in enumerate(items or ())]

    def child(self, key: str) -> "ModelConfig":
        """The object `key`. Fields read from it count as used here."""
        return self._derived(key, {}, self.values.get(key), "" if key in TEXT_PARTS else f"{key}.")

    def changed(self, changes: object, name: str) -> "ModelConfig":
        """This configuration with the fields of the object `changes`, which errors call `name`, in place of its own."""
        return self._derived(name, self.values, changes, self._prefix)

    def wrong(self, key: str, why: str) -> ConfigError:
        """The error for a field with a bad value."""
        return ConfigError(f"{self.origin}: {key} is {_short(self._find(key)[1])}; {why}")

    def _derived(self, name: str, base: Mapping[str, object], values: object, prefix: str) -> "ModelConfig":
        if not isinstance(values, dict):
            raise ConfigError(f"{self.origin}: {name} must be an object, got {_short(values)}")
        other = ModelConfig({**base, **cast("dict[str, object]", values)}, f"{self.origin}: {name}")
        other.used, other.notes, other._prefix = self.used, self.notes, prefix
        return other

    def _find(self, key: str) -> tuple[str, object]:
        """Name under which `key` is found, and its value; None where it is missing."""
        for name in (key, *OTHER_NAMES.get(key, ())):
            if self.values.get(name) is not None:
                return name, self.values[name]
        return key, None

    def _get(self, key: str) -> object:
        name, value = self._find(key)
        if value is not None:
            self.used[self._prefix + name] = value
        return value

    def _typed(self, key: str, kind: type[_Value], name: str) -> _Value | None:
        value = self._get(key)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(key, f"it must be {name}")
        return value

    def _list(self, key: str, kind: type[_Value], name: str) -> list[_Value] | None:
        items = cast("list[_Value] | None", self._typed(key, list, "a list"))
        if items is not None and len(items) > LAYERS_MAX:
            raise ConfigError(f"{self.origin}: {key} has {len(items)} entries; at most {LAYERS_MAX} are allowed")
        if not all(type(item) is kind for item in items or ()):
            raise self.wrong(key, f"it must be a list of {name}")
        return items


def load(path: Path) -> ModelConfig:
    """Read the language model's part of a config.json.

    Args:
        path: the file or its folder.

    Raises:
        ConfigError: the file is missing, or not a model's configuration.
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
    return language_model(ModelConfig(cast("dict[str, object]", values), str(file)))


def language_model(config: ModelConfig) -> ModelConfig:
    """The language model's configuration: `config` itself, or one of its `TEXT_PARTS`."""
    nested = next((part for part in TEXT_PARTS if isinstance(config.values.get(part), dict)), None)
    return config if nested is None or config.has("num_hidden_layers") else config.child(nested)


def _short(value: object) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
