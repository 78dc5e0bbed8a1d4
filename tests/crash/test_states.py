"""Crashes of a machine whose file system had not written all: a sample of ``make test-crash-states``."""

import pytest
from support.node_states import NODES, try_node
from support.swept_states import STORIES, try_story


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.title)
def test_every_state_that_a_crash_may_leave_is_readable(story, memory_dir):
    tried, bad = try_story(story(), memory_dir, seed=1, sample=0.03)
    assert bad == []
    assert tried > 20


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", NODES, ids=lambda kind: kind.title)
def test_a_node_that_lost_its_power_takes_nothing_torn_for_intact_and_brings_back_nothing_deleted(kind, memory_dir):
    tried, bad = try_node(kind, memory_dir, seed=1, sample=0.06)
    assert bad == []
    assert tried > 20
