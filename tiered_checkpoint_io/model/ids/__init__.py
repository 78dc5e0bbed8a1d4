"""The only place where a name, step, key, id or URL is formatted or parsed.

It depends on nothing beyond the standard library, so that ``is_s3_url`` and its kin can be used anywhere.
"""

from tiered_checkpoint_io.model.ids.keys import *  # noqa: F403 - these four are one module, cut for its length
from tiered_checkpoint_io.model.ids.names import *  # noqa: F403
from tiered_checkpoint_io.model.ids.order import *  # noqa: F403
from tiered_checkpoint_io.model.ids.urls import *  # noqa: F403
