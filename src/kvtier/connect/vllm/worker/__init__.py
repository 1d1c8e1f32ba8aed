"""Contains the worker side: copies between vLLM's blocks and host memory."""
