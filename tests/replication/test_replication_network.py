"""Over which interface replicas travel."""

import pytest

from tiered_checkpoint_io.engine.replication.network import Interface, choose, interfaces_here, megabits_of, rate_text
from tiered_checkpoint_io.errors import ConfigError

LO, DOCKER = Interface("lo", "127.0.0.1"), Interface("docker0", "172.17.0.1")
SLOW, FAST, DOWN = Interface("eth0", "10.0.0.5"), Interface("ib0", "10.1.0.5"), Interface("eno1", "10.2.0.5", False)
ALL = [LO, DOWN, DOCKER, SLOW, FAST, Interface("eth0", "fd00::5")]


@pytest.mark.parametrize(
    ("has", "given", "chosen"),
    [
        # The route to the store's host, on any rank: its own host reaches it from the same address.
        (ALL, {"host": "10.1.0.1", "source": "10.1.0.5"}, "ib0"),
        (ALL, {"host": "node0", "source": "fd00::5"}, "eth0"),
        # All ranks are on one host.
        (ALL, {"host": "127.0.0.1", "source": "127.0.0.1"}, "lo"),
        (ALL, {"host": "localhost", "source": "127.0.0.1"}, "lo"),
        # The store's host has its name for 127.0.1.1, as Debian does: the others can't reach it there.
        (ALL, {"host": "node0", "source": "127.0.1.1"}, "eth0"),
        (ALL, {"host": "node0", "source": "127.0.0.1"}, "eth0"),
        (ALL, {"host": "172.17.0.2", "source": "172.17.0.1"}, "eth0"),
        # No way to anywhere, and nothing else.
        (ALL, {"host": "", "source": None}, "eth0"),
        ([LO, DOCKER], {"host": "172.17.0.2", "source": "172.17.0.1"}, "docker0"),
        ([LO], {"host": "node0", "source": "127.0.0.1"}, "lo"),
        ([], {"host": "", "source": None}, None),
        # What is named wins.
        (ALL, {"host": "10.1.0.1", "source": "10.1.0.5", "environment": "eth0"}, "eth0"),
        (ALL, {"host": "10.1.0.1", "source": "10.1.0.5", "environment": "docker0,eth0"}, "docker0"),
    ],
)
def test_which_interface_is_taken(has, given, chosen):
    found = choose(has, **{"environment": "", **given})
    assert (found.name if found else None) == chosen


def test_a_name_that_does_not_exist_is_an_error_that_lists_those_that_do():
    with pytest.raises(ConfigError) as caught:
        choose([LO, FAST], environment="eth9", host="", source=None)
    assert "GLOO_SOCKET_IFNAME is 'eth9'" in str(caught.value)
    assert caught.value.hint == "use one of lo (127.0.0.1), ib0 (10.1.0.5)"


def test_what_this_host_has_and_what_drivers_say_of_rates(tmp_path):
    assert LO in interfaces_here()
    for text, rate in {"-1": "", "0": "", "100": "100 Mbit/s", "2500": "2.5 Gbit/s", "200000": "200 Gbit/s"}.items():
        (tmp_path / "eth0").mkdir(exist_ok=True)
        (tmp_path / "eth0" / "speed").write_text(f"{text}\n")
        assert rate_text(megabits_of("eth0", tmp_path)) == rate
    assert rate_text(megabits_of("lo", tmp_path)) == ""
