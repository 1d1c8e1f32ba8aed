"""Reads a Hugging Face tokenizer file."""

from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError, install_hint


def open_tokenizer(path: Path) -> Any:  # noqa: ANN401 - a class of an extra
    """Return the `tokenizers.Tokenizer` of a tokenizer.json, or of a model's folder that contains one.

    Raises:
        ConfigError: the path has no such file, the file cannot be read, or the package is not installed.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--tokenizer {str(file)!r} is not a file; allowed: a tokenizer.json, or a folder with one")
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))
    except ImportError:
        raise ConfigError(
            f"--tokenizer needs tokenizers, which is not installed: {install_hint('transformers')}"
        ) from None
    except Exception as error:  # the Rust part of tokenizers raises bare Exceptions
        raise ConfigError(f"--tokenizer {str(file)!r} cannot be read: {error}") from error
