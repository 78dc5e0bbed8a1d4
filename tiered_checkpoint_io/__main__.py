"""``python -m tiered_checkpoint_io`` is the command line ``tiered-ckpt``."""

from tiered_checkpoint_io.cli import main

if __name__ == "__main__":
    main()
