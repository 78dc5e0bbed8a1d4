"""The durable tiers that a drain works on are looked at for uploads that were given up, for as long as it runs."""

import logging

from support.clocks import VirtualClock

from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE, Stores
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

DAY = 24 * 3600.0


class Looked:
    def __init__(self, clock):
        self._clock = clock
        self.at = []

    def abort_stale_uploads(self):
        self.at.append(self._clock.now)
        if len(self.at) == 2:
            raise StoreError("away", reason="unavailable")

    def close(self):
        pass


def test_uploads_that_were_given_up_are_looked_for_again_each_day(tmp_path, caplog):
    clock = VirtualClock()
    store = Looked(clock)
    config = TieredCheckpointConfig.from_any(dirpath=str(tmp_path / "durable"), memory_dir=str(tmp_path))
    (tmp_path / CONFIG_FILE).write_text(config.to_json())
    stores = Stores(tmp_path, lambda *_: store, logging.getLogger("test"), clock)
    for _ in range(4 * 24):
        assert stores.get(stores.place) is store
        stores.abort_abandoned(stores.place)
        clock.advance(3600.0)
    assert store.at == [0.0, DAY, 2 * DAY, 3 * DAY]
    assert caplog.text.count("could not look for abandoned uploads") == 1
    stores.close()
    stores.get(stores.place)
    stores.abort_abandoned(stores.place)
    assert store.at[4:] == [4 * DAY], "as it is opened"
