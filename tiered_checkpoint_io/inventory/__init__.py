"""Contents of both tiers: one description of each checkpoint, for programs (``api``) and for the command line."""
