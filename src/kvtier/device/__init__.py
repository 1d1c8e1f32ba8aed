"""How bytes move between an engine's blocks and host slots, one file per kind of device."""
