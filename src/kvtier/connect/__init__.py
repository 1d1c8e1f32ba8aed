"""Contains one package per engine. Only these packages import an engine or know its data structures."""
