"""From a state to a committed part in node memory."""
