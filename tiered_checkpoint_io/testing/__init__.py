"""For those who write or test a Store: its contract, faults, and a real S3 server."""
