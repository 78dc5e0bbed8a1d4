"""Checkpoints of NVIDIA NeMo through both tiers.

Importing this package makes NeMo's ``exp_manager`` work with trainers whose checkpoint IO is ours; all
others it leaves to NeMo. If NeMo is not installed, using a public name raises ModuleNotFoundError, which
says what to install; modules that need only Lightning can be imported all the same.
"""

from importlib.util import find_spec
from typing import Any

from tiered_checkpoint_io.nemo import s3_dirpath_utils as s3_dirpath_utils

__all__ = ["S3CheckpointIO", "S3Utils", "tiered_exp_manager"]

#: NeMo's own names, which need no import: exp_manager sets both.
_ALSO = ("NeMoCheckpointConnector", "TieredNeMoCheckpoint")

# By a module of NeMo's own: any folder that is called nemo would pass for a package.
if find_spec("nemo") is not None and find_spec("nemo.utils") is not None:
    from tiered_checkpoint_io.nemo.checkpoint import TieredNeMoCheckpoint as TieredNeMoCheckpoint
    from tiered_checkpoint_io.nemo.connector import NeMoCheckpointConnector as NeMoCheckpointConnector
    from tiered_checkpoint_io.nemo.exp_manager import take_over, tiered_exp_manager
    from tiered_checkpoint_io.nemo.io import S3CheckpointIO
    from tiered_checkpoint_io.nemo.s3_utils import S3Utils

    take_over()
else:

    def __getattr__(name: str) -> Any:
        if name not in (*__all__, *_ALSO):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        raise ModuleNotFoundError(
            "tiered_checkpoint_io.nemo needs NVIDIA NeMo, which is not installed: pip install 'nemo_toolkit[core]'"
            " (3.0.0 takes lightning up to 2.4.0); without NeMo, use tiered_checkpoint_io.TieredCheckpointIO",
            name="nemo",
        )
