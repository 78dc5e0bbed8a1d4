"""Trainings of two nodes of two ranks: all are killed, a node's memory is gone, and the peers' carries on."""

import os
import re
from pathlib import Path

import pytest
from support.draining import names
from support.fault_proxy import FaultProxy
from support.launch import launch, said
from support.losing import lose_memory

from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store

WORKER = Path(__file__).with_name("training_worker.py")
LAUNCH_TIMEOUT_S = 60
STEPS = 8
ALL = os.environ.get("TIERED_TEST_ALL_LOSSES") == "1"
pytestmark = pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S)


@pytest.fixture
def fit(tmp_path, memory_dir, s3_url):
    """Trains on nodes a and b, unless others are named for the ranks; the answers of the ranks."""

    def fit(job="run", dead=False, endpoint_url=None, nodes="aabb", factor=2, **more):
        jobs = []
        for node in nodes:
            os.makedirs(f"{memory_dir}/{node}", exist_ok=True)
            options = {"dirpath": f"{s3_url}/{job}", "namespace": job, "replication_factor": factor}
            options |= {"memory_dir": f"{memory_dir}/{node}", "endpoint_url": endpoint_url}
            jobs.append({"steps": STEPS, "options": options, **more})
        answers = launch(tmp_path, jobs, worker=WORKER, deadline_s=LAUNCH_TIMEOUT_S)
        for rank, answer in enumerate(answers):
            assert (answer is None) == dead, said(tmp_path, rank)
        return answers

    return fit


@pytest.mark.parametrize("lost", "ab" if ALL else "a")
def test_a_killed_training_goes_on_from_the_memory_of_peers(fit, s3_server, memory_dir, lost):
    whole = fit(job="whole")
    with FaultProxy(s3_server.endpoint_url) as proxy:
        fit(die_at=5, dead=True, endpoint_url=proxy.endpoint_url)
        lose_memory(f"{memory_dir}/{lost}")
        proxy.requests.clear()
        answers = fit(endpoint_url=proxy.endpoint_url)
    # The killed run's lease and preflight's object are read; no object of a checkpoint.
    reads = [target for method, target in proxy.requests if method == "GET" and "list-type" not in target]
    assert [target for target in reads if not re.search("/lease.json|/preflight/", target)] == []
    assert proxy.count("GET", "list-type") > 0, "the proxy has seen nothing at all"
    for answer, unbroken in zip(answers, whole, strict=True):
        # Callbacks that save come last: the step at which all were killed was not saved.
        assert (answer["from"][0], answer["began_at"]) == (4, 4)
        steps = [str(step) for step in range(4, STEPS + 1)]
        assert answer["weights"] == {step: unbroken["weights"][step] for step in steps}


@pytest.mark.matrix
def test_what_rank_0_resumes_from_other_nodes_is_uploaded_at_the_end(fit, s3_url):
    fit(factor=1, steps=4)
    store = open_store(TieredCheckpointConfig(dirpath=f"{s3_url}/run"))
    assert names(store) == []
    # Rank 0 is now on a node that held nothing, and there is nothing left to train.
    answers = fit(factor=1, steps=4, nodes="cabb", save_on_train_end=True)
    assert names(store) == ["end_of_training.ckpt"]
    assert [answer["from"] for answer in answers] == [[4, "peer"], *[[4, "memory"]] * 3]
