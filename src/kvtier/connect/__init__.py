"""One file or small package per engine; the only place that speaks the engine's language."""
