"""Thin translations from frameworks to the engine; no policy."""
