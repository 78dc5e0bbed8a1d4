"""Which checkpoint a restart takes, and how its bytes come to where they are needed."""
