"""Nodes in networks of their own: joined by a cable that is cut while copies travel, or by two networks."""

import contextlib
import os
import shutil
import subprocess

import pytest

#: What a save may take while the network is away: it has nothing to do with that.
AT_ONCE_S = 3.0
_FLOATS = 20_000_000


@pytest.fixture
def places():
    """Two network namespaces, one a node, and a pair of devices between them."""
    with namespaces(["10.213.0"]) as (names, (devices,)):
        yield {node: {"name": names[node], "device": devices[node], "master": "10.213.0.1"} for node in "ab"}


@pytest.fixture
def two_networks():
    """The same with two networks: the hosts' names are of the first, and the store of torch.distributed in the other."""
    with namespaces(["10.213.0", "10.214.0"]) as (names, (first, second)):
        hosts = {"a": "10.213.0.1", "b": "10.213.0.2"}
        yield {
            node: {
                "name": names[node],
                "device": second[node],
                "other": first[node],
                "master": "10.214.0.1",
                "hostname": hosts[node],
            }
            for node in "ab"
        }


@contextlib.contextmanager
def namespaces(networks):
    """The names of two network namespaces, and for each network the device of each of them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and the command ip (iproute2)")
    names = {node: f"tiered-{os.getpid()}-{node}" for node in "ab"}
    cables = [dict.fromkeys("ab", f"cable{number}") for number, _ in enumerate(networks)]
    made = []

    def ip(*arguments):
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this machine allows no network namespaces: ip {' '.join(arguments)}: {done.stderr.strip()}")

    try:
        for name in names.values():
            ip("netns", "add", name)
            made.append(name)
        for network, devices in zip(networks, cables, strict=True):
            pair = "type", "veth", "peer", devices["b"], "netns", names["b"]
            ip("link", "add", devices["a"], "netns", names["a"], *pair)
            for number, node in enumerate("ab", start=1):
                ip("-n", names[node], "addr", "add", f"{network}.{number}/24", "dev", devices[node])
                for device in ("lo", devices[node]):
                    ip("-n", names[node], "link", "set", device, "up")
        yield names, cables
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def test_a_cable_that_is_cut_costs_copies_and_nothing_else(ranks, places):
    save, wait = "save_alone", "wait_for_copies"
    steps = [
        ["hurry", {"accept_s": 3.0, "message_s": 2.0, "store_answer_s": 2.0, "replication_linger_s": 0.5}],
        ["hurry", {"peer_silence_s": 2.0, "peer_back_s": 2.0}],
        ["meet_all"],
        [save, 1, 0],
        [wait, 0, 30],
        # The copy of step 2 is on its way when the cable is cut.
        ["cut_while_reading", 1, 2],
        [save, 2, 0, {"size": _FLOATS}],
        [wait, 0, 60],
        ["mark", 0, "cut"],
        # The other side, which can't reach the store either.
        ["await_mark", 1, "cut"],
        [save, 3, 1],
        [wait, 1, 60],
        ["mark", 1, "done"],
        ["await_mark", 0, "done"],
        ["link_set", "up", {"rank": 1}],
        ["mark", 1, "mended"],
        ["await_mark", 0, "mended"],
        # Neighbours may need a moment to find each other again.
        ["save_until_copied", 0, [10, 11, 12, 13, 14]],
        ["save_until_copied", 1, [20, 21, 22, 23, 24]],
        ["settle"],
        ["close"],
    ]
    told = ranks("ab", *steps, places=places, replication_factor=2, memory_keep_last=9)
    saves = {step[1]: answers[step[2]] for step, answers in zip(steps, told, strict=True) if step[0] == save}
    assert max(saves[step] for step in (1, 3)) < AT_ONCE_S, saves
    waits = [answers[step[1]] for step, answers in zip(steps, told, strict=True) if step[0] == wait]
    assert all(each["pending"] == 0 and each["seconds"] < 30 for each in waits), waits
    first, cut, other_side = waits
    assert first["counts"]["replicated"] == 1
    assert cut["counts"] == {**cut["counts"], "replicated": 1, "unreplicated": 1}
    assert other_side["counts"] == {**other_side["counts"], "unreplicated": 1}
    mended, settled = [answers[rank] for rank, answers in enumerate(told[-4:-2])], told[-2]
    assert all(mended), "copies are not made again"
    # Nothing was lost, and what was saved since is with the peer again; no half of step 2 is.
    assert [step for step, *_ in settled[0]["own"]][:3] == [1, 2, 10]
    assert [step for step, *_ in settled[1]["own"]][:2] == [3, 20]
    assert [step for step, *_ in settled[1]["copies"]] == [1, mended[0]]
    assert [step for step, *_ in settled[0]["copies"]] == [mended[1]]


def test_replicas_travel_over_the_route_to_the_others(ranks, two_networks):
    """Not over the network of the hosts' names, which gloo takes."""
    of_names, of_store = (two_networks["a"][each] for each in ("other", "device"))
    told, before, _, waited, settled, after = ranks(
        "ab",
        ["meet_and_tell"],
        ["sent_bytes"],
        ["save_alone", 1, 0, _FLOATS // 10],
        ["wait_for_copies", 0, 60],
        ["settle"],
        ["sent_bytes"],
        places=two_networks,
        replication_factor=2,
    )
    assert [each for each in told[0] if f"replicas travel over {of_store} (10.214.0.1)" in each] == told[0] != []
    assert waited[0]["counts"]["replicated"] == 1 and settled[1]["copies"] == [[1, 0, True]]
    sent = {name: after[0][name] - before[0][name] for name in (of_names, of_store)}
    other = sent.pop(of_store)
    assert other > _FLOATS // 10 * 4 > 10 * max(sent.values()), (other, sent)
