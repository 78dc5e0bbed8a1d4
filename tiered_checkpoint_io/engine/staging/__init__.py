"""What a session itself needs of a save: slots filled in node memory, retention, the background task, known names."""
