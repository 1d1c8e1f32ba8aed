"""The interface of a copier between an engine's blocks and host slots, and the page lock of host memory."""
