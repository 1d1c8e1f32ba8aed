"""Contains the scheduler side: everything that is decided and counted in the process of vLLM's scheduler."""
