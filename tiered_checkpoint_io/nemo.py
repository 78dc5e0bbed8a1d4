"""Checkpoints of NVIDIA NeMo through both tiers.

Importing this module makes NeMo's ``exp_manager`` work with trainers whose checkpoint IO is ours; all
others it leaves to NeMo.

Raises:
    ModuleNotFoundError: NeMo is not installed; says what to install.
"""

from importlib.util import find_spec

# By a module of NeMo's own: any folder that is called nemo would pass for a package.
if find_spec("nemo") is None or find_spec("nemo.utils") is None:
    raise ModuleNotFoundError(
        "tiered_checkpoint_io.nemo needs NVIDIA NeMo, which is not installed: pip install 'nemo_toolkit[core]'"
        " (3.0.0 takes lightning up to 2.4.0); without NeMo, use tiered_checkpoint_io.TieredCheckpointIO",
        name="nemo",
    )

from tiered_checkpoint_io.adapters import nemo_dirpath as s3_dirpath_utils
from tiered_checkpoint_io.adapters.nemo_concurrency import Topology, advise
from tiered_checkpoint_io.adapters.nemo_connector import NeMoCheckpointConnector
from tiered_checkpoint_io.adapters.nemo_io import S3CheckpointIO
from tiered_checkpoint_io.adapters.nemo_s3_utils import S3Utils
from tiered_checkpoint_io.callbacks.nemo_checkpoint import TieredNeMoCheckpoint
from tiered_checkpoint_io.callbacks.nemo_exp_manager import take_over, tiered_exp_manager

__all__ = [
    "NeMoCheckpointConnector",
    "S3CheckpointIO",
    "S3Utils",
    "TieredNeMoCheckpoint",
    "Topology",
    "advise",
    "s3_dirpath_utils",
    "tiered_exp_manager",
]

take_over()
