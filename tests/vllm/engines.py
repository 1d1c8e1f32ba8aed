"""Engines of the checkpoints that the tests make, with small settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from harness import Answer, Engine
from judge import prompt

EXACT = ("llama", "gemma3", "deepseek")
"""Models that run with float32: neither batches nor chunks nor cached blocks change more than the last bits."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    # vLLM's kernels for the CPU have bfloat16 only.
    "qwen3-next": {"dtype": "bfloat16"},
    "deepseek": {
        # The reference, which any CPU has; with AMX vLLM would take one for bfloat16.
        "attention_backend": "CPU_MLA",
        # vLLM's own rotary kernel gives other numbers there for each length of a batch (0.32 and 0.33).
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    },
}
"""Of `vllm.LLM`, by model."""

PROMPTS = {"long": (1400, 1), "short": (700, 2)}
LONG, SHORT = (prompt(*PROMPTS[name]) for name in ("long", "short"))

Expected = Callable[[str], dict[str, Answer]]
"""What a model answers to `PROMPTS`."""


class Start(Protocol):
    """Starts engines."""

    def __call__(self, model: str | Path = "llama", connector: dict[str, Any] | None = None, **fields: Any) -> Engine:
        """An engine that runs until the test ends it or is over."""
        ...


def small_engine(
    checkpoints: Path, model: str | Path, log: Path, connector: dict[str, Any] | None, **fields: Any
) -> Engine:
    """An engine of one of our checkpoints, or of one at a path."""
    name = model if isinstance(model, str) else "llama"
    small = {"dtype": "float32", "max_model_len": 4096, "kv_cache_memory_bytes": 64 << 20}
    return Engine(checkpoints / model, log, connector, **small | ARGUMENTS.get(name, {}) | fields)
