"""The interface of copiers between an engine's blocks and host slots, and page locks on host memory."""
