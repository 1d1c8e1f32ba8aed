"""KV-cache offloading for LLM inference: a cache may forget; it must never lie, and never stall."""

__version__ = "0.1.0"
