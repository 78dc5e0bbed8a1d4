"""Crashes of a machine whose file system had not written all: a sample of ``make test-crash-states``."""

import pytest
from support.swept_states import STORIES, try_story


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.title)
def test_every_state_that_a_crash_may_leave_is_readable(story, memory_dir):
    tried, bad = try_story(story(), memory_dir, seed=1, sample=0.05)
    assert bad == []
    assert tried > 20
