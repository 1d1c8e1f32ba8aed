"""`kvtier bench quality`: the effect of lossy KV on the answers of real models."""
