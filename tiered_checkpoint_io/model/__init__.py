"""Data model of checkpoints: names and ids, manifests, configuration. Pure; no input or output."""
