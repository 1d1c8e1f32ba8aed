"""`kvtier bench quality`: what lossy KV changes in the answers of real models."""
