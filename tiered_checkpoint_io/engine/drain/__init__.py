"""From node memory to the durable tier: the drain, its queue, and its trainer's handle."""
