"""What optimizers hold, through the sharded strategies: parameters without gradients, and groups of any kind."""

import pytest
from support.restoring import flip
from support.training import wipe

from .test_sharded import LAUNCH_TIMEOUT_S, fit  # noqa: F401

pytestmark = pytest.mark.timeout(4 * LAUNCH_TIMEOUT_S)


@pytest.mark.matrix
@pytest.mark.parametrize("joins", [6, 99])
def test_a_run_goes_on_where_some_parameters_had_no_gradients_yet(fit, joins, tmp_path, memory_dir):  # noqa: F811
    more = {"joins": joins, "ckpt_path": "step=4.ckpt"}
    whole, _ = fit(8, **{**more, "dirpath": tmp_path / "whole", "ckpt_path": "tiered:latest"})
    fit(4, **{**more, "ckpt_path": "tiered:latest"})
    first, _ = fit(8, **more)
    assert first["from"][:2] == ["step=4.ckpt", 4]
    assert first["losses"] == {index: whole["losses"][index] for index in range(4, 8)}, "bit for bit"
    # The same where newer ones turn out to be damaged while they are read.
    wipe(memory_dir)
    for shard in (tmp_path / "durable").glob("*/*.distcp"):
        if shard.parent.name != "step=4.ckpt":
            flip(shard, at=shard.stat().st_size // 2)
    again, _ = fit(8, **{**more, "ckpt_path": "tiered:latest"})
    assert (again["from"][:2], again["losses"]) == (first["from"][:2], first["losses"])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        ({"strategy": "fsdp1"}, {"strategy": "fsdp1"}, "AdamW"),
        ({"strategy": "fsdp2"}, {"strategy": "fsdp2"}, "AdamW"),
        ({"strategy": "ddp"}, {"strategy": "fsdp2"}, "AdamW"),
        ({"strategy": "fsdp2", "full": True}, {"strategy": "fsdp2"}, "SGD"),
        ({"strategy": "ddp"}, {"strategy": "fsdp1"}, "SGD"),
        ({"strategy": "fsdp1", "full": True}, {"strategy": "fsdp1"}, "AdamW"),
        ({"strategy": "fsdp1", "full": True}, {"strategy": "ddp"}, "AdamW"),
    ],
)
def test_groups_of_parameters_go_on_whatever_is_in_them(fit, before, after, optimizer, tmp_path):  # noqa: F811
    """One is empty; their order, and that within each, is not the model's; layers are wrapped; SGD has no state."""
    more = {"optimizer": optimizer, "wrapped": "ddp" not in (before["strategy"], after["strategy"])}
    whole, _ = fit(8, **after, **more, dirpath=tmp_path / "whole")
    fit(4, **before, **more)
    first, _ = fit(8, **after, **more)
    assert first["from"][:2] == ["step=4.ckpt", 4]
    assert first["losses"] == pytest.approx({index: whole["losses"][index] for index in range(4, 8)}, rel=1e-5)
