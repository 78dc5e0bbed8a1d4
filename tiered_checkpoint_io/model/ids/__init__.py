"""The only package that formats or parses names, steps, keys, ids and URLs.

It depends only on the standard library, so that any module can use ``is_s3_url`` and the other functions.
"""

from tiered_checkpoint_io.model.ids.keys import *  # noqa: F403 - these four are one module, cut for its length
from tiered_checkpoint_io.model.ids.names import *  # noqa: F403
from tiered_checkpoint_io.model.ids.order import *  # noqa: F403
from tiered_checkpoint_io.model.ids.urls import *  # noqa: F403
