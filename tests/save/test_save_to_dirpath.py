"""A save that names dirpath itself, in place of a file below it."""

import pytest
import torch
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.errors import ConfigError


@pytest.mark.parametrize("ending", ["", "/"])
def test_dirpath_itself_is_no_name_of_a_checkpoint(tmp_path, memory_dir, ending):
    root = tmp_path / "run"
    root.mkdir()
    io = build(TieredCheckpointIO, root, memory_dir=memory_dir, drain="thread")
    with pytest.raises(ConfigError):
        io.save_checkpoint({"w": torch.zeros(1)}, f"{root}{ending}")
    io.teardown()
    assert [path.name for path in root.iterdir() if path.name != ".tiered"] == []
