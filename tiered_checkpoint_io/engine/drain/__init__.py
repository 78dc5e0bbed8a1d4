"""From node memory to the durable tier: the drain, its queue, and who starts and watches it."""
