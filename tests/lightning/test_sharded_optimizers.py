"""States of optimizers through the sharded strategies: parameters without gradients, and groups of any kind."""

import pytest
from support.restoring import flip
from support.training import wipe

from .test_sharded import those_of

pytestmark = pytest.mark.timeout(400)


@pytest.mark.matrix
@pytest.mark.parametrize("joins", [6, 99])
def test_a_run_goes_on_where_some_parameters_had_no_gradients_yet(fits, joins, whole, tmp_path, memory_dir):
    stages = {"steps": 4, "wipe": True}, {"steps": 8, "ckpt_path": "step=4.ckpt"}
    (whole, _), _, (first, _) = fits(whole, *stages, joins=joins)
    assert first["from"][:2] == ["step=4.ckpt", 4]
    assert first["losses"] == those_of(whole, first), "bit for bit"
    # The same if newer ones turn out to be damaged while they are read.
    wipe(memory_dir)
    for shard in (tmp_path / "durable").glob("*/*.distcp"):
        if shard.parent.name != "step=4.ckpt":
            flip(shard, at=shard.stat().st_size // 2)
    ((again, _),) = fits({"steps": 8}, joins=joins)
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
def test_groups_of_parameters_go_on_whatever_is_in_them(fits, before, after, optimizer, whole):
    """One is empty; their order, and that within each, is not the model's; layers are wrapped; SGD has no state."""
    more = {"optimizer": optimizer, "wrapped": "ddp" not in (before["strategy"], after["strategy"])}
    stages = {"steps": 4, "wipe": True, **before}, {"steps": 8, **after}
    (whole, _), _, (first, _) = fits({**whole, **after}, *stages, **more)
    assert first["from"][1] == 4
    assert first["losses"] == pytest.approx(those_of(whole, first), rel=1e-5)
