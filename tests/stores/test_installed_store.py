"""A store of another package, found by its entry point: it keeps the contract, and a job's commands use it."""

import sys
from pathlib import Path

import pytest
from support.documented import command, verified
from support.draining import Node
from support.store_contract import StoreContract

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store
from tiered_checkpoint_io.stores.installed import GROUP

ROOT = Path(__file__).parents[2]
#: The example, and a function that gives no store.
MODULE = (ROOT / "examples/sqlite_store.py").read_text()
BROKEN = """
def no_store(url, config):
    return None
"""


def install(folder, value="acme_store:open_acme", package="acme-store", scheme="acme"):
    """Writes the files that ``pip install`` leaves: a module, and the metadata of a package that names it."""
    folder.mkdir(exist_ok=True)
    (folder / "acme_store.py").write_text(MODULE + BROKEN)
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{scheme} = {value}\n")
    return folder


@pytest.fixture
def site(tmp_path, monkeypatch):
    # Each scheme is looked for once a process.
    site = install(tmp_path / "site", scheme="kept")
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop("acme_store", None)


@pytest.mark.matrix
class TestInstalledStore(StoreContract):
    @pytest.fixture
    def store(self, site, tmp_path):
        store = open_store(TieredCheckpointConfig.from_any(dirpath=f"kept://{tmp_path}/root"))
        assert type(store).__name__ == "AcmeStore"
        yield store
        store.close()


def test_a_drain_and_the_commands_use_it(site, tmp_path, memory_dir):
    """The drain in a process of its own, as users have it."""
    url = f"kept://{tmp_path}/durable"
    node = Node(memory_dir, url)
    node.save("1.ckpt", b"A" * 1000)
    assert command("flush", *node.where).exit_code == 0
    assert "durable\tlatest" in command("ls", url, "--memory-dir", memory_dir).stdout.replace("\tfull", "")
    assert command("verify", url).stdout == verified(("intact", "durable", "1.ckpt"))
    assert (tmp_path / "durable.sqlite").exists()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("acme_store:missing", "acme_store:missing of acme-broken, can't be imported"),
        ("acme_store:no_store", "acme_store:no_store of acme-broken gave a NoneType"),
        ("both", "both:// has several stores: acme_store:open_acme of acme-one, acme_store:open_acme of acme-two"),
    ],
)
def test_one_that_can_not_be_used_is_an_error_that_names_its_package(value, said, tmp_path, monkeypatch):
    # Each scheme is looked for once a process.
    scheme = value.rpartition(":")[2].replace("_", "-")
    packages = {"acme-one": "acme_store:open_acme", "acme-two": "acme_store:open_acme"}
    for package, each in packages.items() if value == "both" else [("acme-broken", value)]:
        install(tmp_path / "site", each, package, scheme)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ConfigError) as caught:
        open_store(TieredCheckpointConfig.from_any(dirpath=f"{scheme}://x"))
    sys.modules.pop("acme_store", None)
    assert said in str(caught.value)
