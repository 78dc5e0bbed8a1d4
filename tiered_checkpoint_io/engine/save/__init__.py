"""One save: the facts that its ranks agree on, and one way to carry it out, from the capture to the report."""
