"""What both tiers hold: one description of each checkpoint, for programs (``api``) and for the command line."""
