"""The decisions. Pure and synchronous: events and a time go in, transfers come out."""
