"""Means of a session for its saves: slots filled in node memory, retention, the background task, known names."""
