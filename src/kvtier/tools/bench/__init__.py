"""The measurements of `kvtier bench`. They return plain results, from which other modules make reports."""
