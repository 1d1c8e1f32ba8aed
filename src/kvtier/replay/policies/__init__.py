"""Policies to compare with, of which none is shipped: yardsticks of the literature, and bounds that know the future."""
