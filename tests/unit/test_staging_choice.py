"""Whether a capture overlaps training or blocks it: whichever costs less."""

from tiered_checkpoint_io.callbacks.staging_choice import StagingChoice


def test_the_cheaper_way_is_chosen_and_tried_again():
    choice = StagingChoice()
    for _ in range(3):
        assert not choice.overlaps, "eager saves are measured first"
        choice.note_eager(0.05)
    assert [choice.note_overlapped(0.01) for _ in range(5)] == [False] * 5
    assert choice.overlaps
    lost = [choice.note_overlapped(0.2) for _ in range(5)]
    assert lost.count(True) == 1, "said once"
    assert not choice.overlaps
    eager = 0
    while not choice.overlaps:
        choice.note_eager(0.05)
        eager += 1
    assert eager == 100
