"""How checkpoints come to be, and cease to be, on the durable tier, and how they are read from it."""
