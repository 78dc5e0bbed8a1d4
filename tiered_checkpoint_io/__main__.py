"""``python -m tiered_checkpoint_io`` is the command line ``tiered-ckpt``, and what trainers start their drains by."""

import sys

from tiered_checkpoint_io.engine.drain.process import FOR_TRAINER

if __name__ == "__main__":
    if sys.argv[1:-1] == FOR_TRAINER:
        from tiered_checkpoint_io.engine.drain.standalone import main
    else:
        from tiered_checkpoint_io.cli import main
    main()
