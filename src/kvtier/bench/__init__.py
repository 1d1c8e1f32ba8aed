"""The measurements of `kvtier bench`. They return plain results; reports are made from these."""
