"""Two runs save one name, such as that of a preemption: neither writes to a file of the other."""

from tiered_checkpoint_io.engine.drain.process import DrainRunner
from tiered_checkpoint_io.engine.save.coordinated import CoordinatedSaver
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.formats.image import Image, Segment
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


def test_what_others_read_has_its_own_name_where_no_other_save_can_have_it(memory_dir, tmp_path, monkeypatch):
    # Its drain never works.
    monkeypatch.setattr(DrainRunner, "ensure", lambda _: None)
    session = Session(TieredCheckpointConfig.from_any(dirpath=str(tmp_path / "durable"), memory_dir=memory_dir))
    saver = CoordinatedSaver(session)

    def meta_of(step, name, *, durable=True):
        """Saves as Lightning's strategies do, shards and ``meta.pt`` beside them; the latter's name."""
        facts = saver.issue(name, step=step, world_size=1, durable=durable, dirpath=session.dirpath)
        shard = memoryview(b"shard of %d" % step)
        saver.capture(facts, 0, Image(len(shard), (Segment(0, shard),), (), planned=True))
        saver.finish(facts.save_id, lambda: b"metadata", wait=False, extra=("meta.pt", b"the rest of %d" % step))
        files = session.open().tier.parts()[-1].part.content.files
        (found,) = [each.basename for each in files if each.basename.startswith("meta")]
        return found

    try:
        assert meta_of(4, "epoch=0-step=4.ckpt") == "meta.pt"
        # A run that went back to an earlier step saves the same one again; the first may not be uploaded yet.
        assert meta_of(8, "step=8.ckpt", durable=False) == "meta.pt"
        assert meta_of(8, "step=8.ckpt") != "meta.pt"
        # What memory alone holds may be uploaded later, by tiered-ckpt flush.
        session.known.remember({"step=10.ckpt"})
        assert meta_of(10, "step=10.ckpt", durable=False) != "meta.pt"
        assert meta_of(12, "preempted.ckpt", durable=False) != "meta.pt"
    finally:
        session.release()
