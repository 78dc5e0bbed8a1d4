"""What checkpoints cost a run and what is at risk, in figures: one catalogue, one collector, several exporters."""
