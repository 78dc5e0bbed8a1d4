"""The durable tiers that a drain works on: each on the server that the part or request was made for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.errors import ConfigError, StoreError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.tier import AUTO, MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.stores import Store, config_at, place_of

CONFIG_FILE = "drain.json"


def last_config(root: Path) -> TieredCheckpointConfig | None:
    """Returns the configuration of the last trainer over a memory tier; None if it can't be read."""
    try:
        return TieredCheckpointConfig.from_json((root / CONFIG_FILE).read_text())
    except (OSError, ConfigError, ValueError):
        return None


def tier_at(root: Path) -> MemoryTier:
    """Returns the memory tier of a root with its spill."""
    tier, config = MemoryTier(root), last_config(root)
    tier.use_spill(config.spill_dir if config is not None else AUTO)
    tier.place = place_of(config) if config is not None else None
    return tier


class Stores:
    """One store for each place; all are opened again when the configuration changes."""

    def __init__(
        self,
        root: Path,
        open_store: Callable[[TieredCheckpointConfig, str | None, Clock], Store],
        logger: Logger,
        clock: Clock,
    ) -> None:
        self._path = root / CONFIG_FILE
        self._open_store = open_store
        self._log = logger
        self._clock = clock
        self._stamp = 0
        self._stores: dict[Place, Store] = {}
        #: When each of these was last looked at for abandoned uploads.
        self._looked: dict[Place, float] = {}
        self._config: TieredCheckpointConfig | None = None
        self._place: Place | None = None

    @property
    def config(self) -> TieredCheckpointConfig:
        """The configuration as it is now; raises OSError if there is none, ConfigError if it is not valid."""
        stamp = self._path.stat().st_mtime_ns
        if self._config is None or stamp != self._stamp:
            self.close()
            self._config = TieredCheckpointConfig.from_json(self._path.read_text())
            self._place, self._stamp = place_of(self._config), stamp
        return self._config

    @property
    def place(self) -> Place | None:
        """The configured place; raises as :attr:`config` does."""
        return self._place if self.config else None

    def get(self, place: Place) -> Store:
        """Returns the store of a place; raises as :attr:`config` does, and if the store can't be opened."""
        config = self.config
        if place not in self._stores:
            clock = self._clock
            if place != self._place:
                # Operations of the trainer that lives wait for one request of an earlier one's, which is tried again.
                clock = Clock(replace(clock.timing, retry_deadline_s=-1.0), clock.rng)
            self._stores[place] = self._open_store(config_at(config, place), place.dirpath, clock)
        return self._stores[place]

    def abort_abandoned(self, place: Place) -> None:
        """Ends uploads to a place that any node gave up; at most once a day, for as long as the drain runs."""
        abort_stale, now = getattr(self._stores.get(place), "abort_stale_uploads", None), self._clock.monotonic()
        if abort_stale is not None and now - self._looked.get(place, -math.inf) >= self._clock.timing.abandoned_s:
            self._looked[place] = now
            try:
                abort_stale()
            except (StoreError, OSError, RuntimeError) as error:
                # The server may lack this request, or the process have no thread for it: that must not stop uploads.
                self._log.warning("could not look for abandoned uploads: %s", error)

    def all(self) -> list[Store]:
        """Returns the open stores."""
        return list(self._stores.values())

    def close(self) -> None:
        for store in self.all():
            store.close()
        self._stores.clear()
        self._looked.clear()
