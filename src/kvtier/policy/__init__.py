"""Who leaves and who may enter. One small file per policy, all pure: no clock, no I/O, no threads."""
