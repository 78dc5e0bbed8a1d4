"""The memory tier: committed parts and recycled slots in private folders of a tmpfs."""
