"""Which checkpoints are the best, and which are deleted, where uploads come to nothing: no fit needed."""

from types import SimpleNamespace

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.nemo import checkpoint

DIRPATH = "s3://bucket/run"


def url(letter):
    return f"{DIRPATH}/{letter}.ckpt"


def letter_of(path):
    return path.removeprefix(f"{DIRPATH}/").removesuffix(".ckpt")


class Job:
    """A callback, and what its rank 0 knows of the tiers; saves are called by letters."""

    def __init__(self, callback):
        self.names, self.pending, self.outcomes, self.deleted = set(), set(), {}, []
        self.others_wait = False
        known = SimpleNamespace(note=self.note, all=lambda *_: frozenset(self.names))
        session = SimpleNamespace(
            known=known, is_pending=self.pending.__contains__, outcome=self.outcomes.get, log=None
        )
        callback.dirpath = DIRPATH
        self.callback, callback._io = callback, SimpleNamespace(companion="")
        callback._io.checkpointer = SimpleNamespace(
            dirpath=DIRPATH,
            session=session,
            config=SimpleNamespace(retention=None, support=SimpleNamespace(durable_timeout_s=1)),
            restored=None,
            exists=lambda path: f"{letter_of(path)}.ckpt" in self.names,
            remove=lambda path, **_: self.delete(path),
        )
        strategy = SimpleNamespace(
            broadcast=lambda answer, *_: answer,
            reduce_boolean_decision=lambda mine, **_: mine or self.others_wait,
            remove_checkpoint=self.delete,
        )
        self.trainer = SimpleNamespace(is_global_zero=True, world_size=1, strategy=strategy)

    def note(self, name, *, exists):
        (self.names.add if exists else self.names.discard)(name)

    def delete(self, path):
        self.deleted.append(letter_of(path))
        self.pending.add(f"{letter_of(path)}.ckpt")
        self.names.discard(f"{letter_of(path)}.ckpt")

    def save(self, letter, score=None, *, replaces="", tiers=("memory", "durable"), queued=True):
        """A save that takes the place of another one among the best, or of none."""
        callback, path = self.callback, url(letter)
        callback._take_back(self.trainer)
        with callback._replacing({url(each) for each in replaces}):
            callback.best_k_models = {each: of for each, of in callback.best_k_models.items() if each != url(replaces)}
            callback.best_k_models |= {path: score} if callback.monitor else {}
            callback.best_model_path = path
            self.names |= {f"{letter}.ckpt"} if "durable" in tiers else set()
            callback._note_saved(path, SimpleNamespace(tiers={*tiers}, save_id=f"save-{letter}", queued=queued))
            if not (callback._landed or callback._landed_as):
                callback._note_lost(path)
            callback._remove_withheld(self.trainer)
            for each in replaces:
                callback._remove_checkpoint(self.trainer, url(each))
            callback._remove_withheld(self.trainer)

    def gives_up(self, letter):
        self.names.discard(f"{letter}.ckpt")
        self.callback._heed([Outcome(f"save-{letter}", "save", f"{letter}.ckpt", -1, "skipped")])

    def skips_delete(self, letter):
        """As the drain does it where what the delete waits for was given up."""
        self.pending.discard(f"{letter}.ckpt")
        error = "CheckpointNotFoundError"
        self.callback._heed([Outcome("delete", "delete", f"{letter}.ckpt", -1, "skipped", error_type=error)])

    def best(self):
        self.callback._take_back(self.trainer)
        paths = self.callback.best_k_models if self.callback.monitor else [self.callback.best_model_path]
        return [letter_of(path) for path in paths]


def scored(**options):
    return Job(TieredModelCheckpoint(monitor="score", **options))


def resumed(job, of):
    """A job that goes on from another one's state."""
    job.names |= of.names
    job.callback.load_state_dict({**of.callback.state_dict()})
    job.callback.best_k_models = {**of.callback.best_k_models}
    job.callback.best_model_path = of.callback.best_model_path
    return job


def test_a_delete_that_was_never_queued_holds_up_no_other():
    """That of a checkpoint which the durable tier was never to have."""
    job = scored()
    job.save("a", 3)
    job.save("b", 2, replaces="a", tiers=["memory"], queued=False)
    job.save("c", 1, replaces="b")
    job.pending.clear()
    job.gives_up("c")
    job.save("d", 0, replaces="a")
    assert "c" in job.deleted
    assert job.best() == ["d"]


def test_what_is_taken_back_has_reached_the_durable_tier():
    job = scored()
    job.save("c", 2)
    job.save("d", 1, replaces="c")
    job.gives_up("c")
    job.gives_up("d")
    job.skips_delete("c")
    assert (job.best(), job.names) == ([], set())


def test_what_an_earlier_process_has_queued_is_none_of_the_best_once_it_is_given_up():
    before = scored(save_top_k=2)
    before.save("a", 3)
    before.save("b", 2)
    job = resumed(scored(save_top_k=2), before)
    assert job.best() == ["a", "b"]
    job.gives_up("b")
    assert job.best() == ["a"]


def test_what_is_taken_back_is_not_the_newest():
    """NeMo reads the order of the best as that of the saves."""
    job = scored(save_top_k=2)
    job.save("a", 4)
    job.save("b", 3)
    job.save("c", 2, replaces="a")
    job.save("d", 1, replaces="b")
    job.gives_up("c")
    job.skips_delete("a")
    assert job.best() == ["a", "d"]


def test_without_a_monitor_the_best_alone_makes_room_for_what_it_replaced():
    job = Job(TieredModelCheckpoint())
    job.save("a")
    job.save("b", replaces="a")
    job.save("c", replaces="b")
    job.gives_up("b")
    job.skips_delete("a")
    assert (job.best(), [*job.callback._withheld]) == (["c"], [url("a")])
    job.callback.last_model_path = url("last")
    job.callback._saved_as[url("last")] = "save-last"
    job.gives_up("last")
    assert job.best() == ["c"]
    job.gives_up("c")
    job.skips_delete("b")
    assert job.best() == ["a"]


# ------------------------------------------------------------------------------------ ranks with files of their own
def nemo():
    callback = checkpoint.TieredNeMoCheckpoint(monitor="score")
    callback._shards = 2
    return Job(callback)


def test_what_ranks_saved_in_folders_of_their_own_is_there():
    before = nemo()
    before.save("a", 3, queued=False)
    before.names = {f"mp_rank_{rank:02d}/a.ckpt" for rank in range(2)}
    assert resumed(nemo(), before).best() == ["a"]
    before.names = set()
    assert resumed(nemo(), before).best() == []


def test_what_a_queued_save_of_several_ranks_replaced_stays_until_all_have_it():
    job = nemo()
    job.save("a", 2, queued=False)
    # As such a save is reported: it does not count as durable yet.
    job.callback._uploads[url("b")] = "save-b"
    job.save("b", 1, replaces="a", tiers=["memory"])
    assert job.best() == ["b"]
    job.save("x", 3, queued=False)
    assert job.deleted == []
    job.outcomes["save-b"] = SimpleNamespace(state="committed")
    job.others_wait = True
    job.save("y", 3, queued=False)
    assert job.deleted == []
    job.others_wait = False
    job.save("z", 3, queued=False)
    assert job.deleted == ["a"]
