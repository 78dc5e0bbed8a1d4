"""NeMo trainings on several ranks (gloo): real processes, killed and resumed, each counted at a proxy of its own."""

import contextlib
import re
from pathlib import Path

import pytest
from support.fault_proxy import FaultProxy
from support.launch import launch, said
from support.nemo_training import NeMoRuns

WORKER = Path(__file__).with_name("worker.py")
pytestmark = pytest.mark.timeout(300)
EXPORT = {"exp_manager": {"checkpoint_callback_params": {"save_nemo_on_train_end": True}}}


class Ranks(NeMoRuns):
    """Trainings of one job on several ranks of one node."""

    def launch(self, count, steps, *config, way="drop-in", endpoints=(), folder=None, one=None, **options):
        job = {
            "dirpath": self.dirpath,
            "memory_dir": self.memory_dir,
            "logs": self.root,
            "way": way,
            "ranks": count,
            "steps": steps,
            "config": list(config),
            **options,
        }
        jobs = [{**job, **({"endpoint_url": endpoints[rank]} if endpoints else {})} for rank in range(count)]
        for rank, changes in (one or {}).items():
            jobs[rank] |= changes
        self.folder = Path(folder or self.root).parent
        return launch(self.folder, jobs, worker=WORKER, preload=("support.nemo_training",))


@pytest.fixture
def ranks(s3_url, memory_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    return Ranks(f"{s3_url}/checkpoints", memory_dir, tmp_path / "logs")


@pytest.mark.parametrize(("way", "config"), [("drop-in", []), ("tiered", [EXPORT])])
def test_two_ranks_are_killed_and_go_on_and_end_as_if_they_had_not(ranks, way, config, tmp_path):
    whole = Ranks(ranks.dirpath + "-whole", ranks.memory_dir, tmp_path / "logs-whole")
    expected = whole.launch(2, 20, *config, way=way)
    assert expected[0] is not None, said(whole.folder, 0)
    assert ranks.launch(2, 20, *config, way=way, stop_at=13, how="SIGKILL") == [None, None]
    ranks.wipe()
    answers = ranks.launch(2, 20, *config, way=way)
    assert answers[0] is not None, said(ranks.folder, 0)
    for answer in answers:
        assert "error" not in answer, answer
        assert answer["from"][1:] == [10, "durable"]
        assert answer["steps"][0] == 10
        assert answer["path"] == f"{ranks.dirpath}/gpt--val_loss=1.00-step=10.ckpt"
    assert {answer["weights"] for answer in answers} == {expected[0]["weights"]}
    assert answers[0]["best"] == answers[1]["best"]
    assert answers[0]["last"] == answers[1]["last"]
    assert ranks.durable() == whole.durable()
    assert ("gpt.nemo" in ranks.objects()) == bool(config)


@pytest.mark.parametrize(("count", "way"), [(4, "drop-in"), (2, "tiered")])
def test_ranks_above_0_ask_s3_for_nothing_when_they_resume(ranks, count, way, s3_server):
    """Counted when requests arrive, from any client: ours, s3fs, or NeMo's boto3."""
    ranks.launch(1, 5, way=way)
    ranks.wipe()
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(s3_server.endpoint_url)) for _ in range(count)]
        answers = ranks.launch(count, 6, way=way, endpoints=[proxy.endpoint_url for proxy in proxies])
        assert [answer and answer.get("from") for answer in answers] == [
            ["gpt--val_loss=6.00-step=5.ckpt", 5, "durable"]
        ] * count, said(ranks.folder, 0)
        assert [proxy.requests for proxy in proxies[1:]] == [[]] * (count - 1)
        # The drain of rank 0 lists unfinished uploads; to find what to resume from there are two LISTs, one for names that
        # are taken, one of the preflight, and one of the last look. The sweep after the first commit lists the saves and
        # the manifests. A delete looks for holds before the manifest goes, and after that.
        holds = proxies[0].count("GET", "%2Fholds%2F")
        assert holds % 2 == 0
        assert proxies[0].count("GET", "list-type=2") == 7 + holds
        assert proxies[0].count("GET", "%2Fpreflight%2F") == 1
        assert proxies[0].count("GET", "lease.json") > 0
    assert [answer["asked"] for answer in answers[1:]] == [{}] * (count - 1)


def test_a_rank_that_can_make_no_temporary_folder_ends_all_ranks(ranks):
    """The other ranks would wait for this one, in the export or after it."""
    answers = ranks.launch(2, 2, EXPORT, one={1: {"no_folder": True}})
    assert [answer and re.match(r"SaveError: the model could not be exported: OSError: no folder", answer["error"])
            is not None for answer in answers] == [True, True], said(ranks.folder, 0)  # fmt: skip
