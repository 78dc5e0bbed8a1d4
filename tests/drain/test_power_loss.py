"""Remains of a root on a disk after a power loss, by hand; all states of a life are tried in tests/crash."""

import shutil

import pytest
from support.draining import drain, readable


@pytest.mark.timeout(30)
def test_a_drain_by_hand_makes_the_folders_that_were_lost_and_a_corrupt_part_is_tried_once(node):
    node.save("a.ckpt", b"a" * 1000)
    (stored,) = node.tier.parts()
    stored.file("a.ckpt").write_bytes(b"x" * 1000)
    for name in ("quarantine", "slots", "status", "trash"):
        shutil.rmtree(node.root / name)
    assert drain(node).run(once=True)
    assert node.tier.parts() == []
    assert len(node.tier.quarantined()) == 1
    shutil.rmtree(node.root / "saves")
    assert drain(node).run(once=True), "without that there is nothing to drain"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("torn", ["", '{"dirpath": "', "[]", "null"])
def test_a_damaged_configuration_is_said_and_the_next_trainer_mends_it(torn, node, store, caplog):
    node.save("a.ckpt", b"a" * 1000)
    (node.root / "drain.json").write_text(torn)
    assert drain(node).run(once=True)
    assert "a.ckpt failed, to be tried again" in caplog.text
    (node.root / "drain.json").write_text(node.config.to_json())
    assert drain(node).run(once=True)
    assert readable(store, "a.ckpt") == b"a" * 1000
