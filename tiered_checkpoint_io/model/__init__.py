"""What checkpoints are, as data: names and ids, manifests, configuration. Pure; no input or output."""
