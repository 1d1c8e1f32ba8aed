"""The scheduler side: what is decided and counted in the process of vLLM's scheduler."""
