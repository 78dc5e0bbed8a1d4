"""``python -m tiered_checkpoint_io`` is the command line ``tiered-ckpt``, and what trainers' drains begin with."""

import sys

from tiered_checkpoint_io.engine.drain.process import FOR_TRAINER


def main() -> None:
    """Runs the drain of a trainer, or a command."""
    if sys.argv[1:-1] == FOR_TRAINER:
        from tiered_checkpoint_io.engine.drain.process import main as run
    else:
        from tiered_checkpoint_io.cli import main as run
    run()


if __name__ == "__main__":
    main()
