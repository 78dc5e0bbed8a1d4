"""Policies of the durable tier: the decision, as properties, and the ways to write policies."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.retention import Best, Checkpoint, EverySteps, Latest, kept

DEFAULT = Path(__file__).parents[2] / "configs" / "s3_checkpointing" / "default.yaml"
POLICIES = st.lists(
    st.one_of(
        st.integers(1, 4).map(Latest),
        st.integers(1, 30).map(EverySteps),
        st.builds(Best, st.integers(1, 3), st.sampled_from(["loss", "acc"]), st.sampled_from(["min", "max"])),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def tiers(draw):
    """Returns a durable tier: saves in order, some at one step, with metrics; aliases and copies of them."""
    found = []
    for number in range(draw(st.integers(0, 12))):
        name = f"c{number}"
        found.append(
            Checkpoint(
                name=name,
                save_id=f"s{number:03d}",
                step=draw(st.integers(-1, 60)),
                created=draw(st.floats(0, 100_000) | st.just(float("nan"))),
                kind=draw(st.sampled_from(["full", "full", "sharded"])),
                resumable=draw(st.booleans()),
                metrics=draw(st.dictionaries(st.sampled_from(["loss", "acc"]), st.floats())),
                is_changing=draw(st.integers(0, 9)) == 0,
            )
        )
    if found and draw(st.booleans()):
        target = draw(st.sampled_from(found))
        found.append(Checkpoint("alias", target.save_id, target.step, alias_of=target.name))
        found.append(Checkpoint("last", "s999", target.step, is_copy=True))
    return found


def left(tier, policies):
    why = kept(tier, policies)
    assert list(why) == [each.name for each in tier]
    return [each for each in tier if why[each.name]]


_AT_ONE_STEP = [
    Checkpoint("other", "s1", resumable=False),
    Checkpoint("weights", "s2", 5, resumable=False),
    Checkpoint("all", "s3", 5),
    Checkpoint("newer", "s4", 6),
]


@settings(max_examples=60)
@given(tiers(), POLICIES)
@example(_AT_ONE_STEP, [Latest(1)])
def test_what_must_stay_stays_and_a_second_look_removes_no_more(tier, policies):
    there = left(tier, policies)
    names = {each.name for each in there}
    for kind in ("full", "sharded"):
        good = [each for each in tier if each.kind == kind and each.resumable and not (each.alias_of or each.is_copy)]
        assert not good or max(good, key=lambda each: each.save_id).name in names
    for each in tier:
        must = each.alias_of or each.is_copy or each.is_changing
        assert not must or each.name in names
        assert each.alias_of is None or each.alias_of in names
    # Removed checkpoints change no decision.
    assert left(there, policies) == there
    # One policy that keeps it is enough, and a policy more never removes one.
    each_alone = [{each.name for each in left(tier, [policy])} for policy in policies]
    assert names == set().union(*each_alone)


@settings(max_examples=60)
@given(tiers(), st.integers(1, 4), st.integers(1, 3))
def test_latest_and_best_keep_as_many_steps_as_they_say(tier, latest, best):
    saves = [each for each in tier if not (each.alias_of or each.is_copy)]

    def steps(checkpoints):
        return {each.step if each.step >= 0 else each.name for each in checkpoints}

    def why(policy):
        reasons = kept(tier, [policy])
        return [each for each in saves if policy.text in reasons[each.name]]

    whole = steps(each for each in saves if each.resumable)
    assert len(steps(why(Latest(latest))) & whole) == min(latest, len(whole))
    rated = {
        key: min(values)
        for key in steps(saves)
        if (
            values := [
                each.metrics["loss"]
                for each in saves
                if key in (each.step, each.name) and each.metrics.get("loss", float("nan")) == each.metrics.get("loss")
            ]
        )
    }
    chosen = steps(why(Best(best, "loss")))
    assert len(chosen) == min(best, len(rated))
    assert all(rated[one] <= rated[other] for one in chosen for other in rated.keys() - chosen)


def test_every_so_many_steps_keep_the_first_of_each_as_time_goes_on():
    steps, there = range(40, 700, 60), []
    for number, step in enumerate(steps):
        # Each save is followed by the decision, as in a run.
        there.append(Checkpoint(f"step={step}", f"s{number:03d}", step, created=number * 1800.0))
        there = left(there, [EverySteps(200)])
    assert [each.step for each in there] == [220, 400, 640]


def test_averages_and_process_groups_of_one_step_go_together():
    pairs = [
        Checkpoint(name, f"s{number}", step)
        for number, (name, step) in enumerate([("a", 1), ("a-EMA", 1), ("tp0/b", 2), ("tp1/b", 2), ("c", 3)])
    ]
    assert [each.name for each in left(pairs, [Latest(2)])] == ["tp0/b", "tp1/b", "c"]


MAX = {"best": 1, "metric": "acc", "mode": "max"}
FORMS = [
    [Latest(2), EverySteps(100), Best(3, "val_loss"), Best(1, "acc", "max")],
    {"latest": 2, "every_steps": 100, "best": [{"best": 3, "metric": "val_loss"}, MAX]},
    [{"latest": 2}, {"every_steps": 100}, {"best": 3, "metric": "val_loss"}, MAX],
]


def test_a_last_that_is_a_save_of_its_own_stays_until_there_is_a_newer_one():
    tier = [Checkpoint("last.ckpt", "s1", 10)] + [Checkpoint(f"step={n}.ckpt", f"s{n}", n * 10) for n in range(2, 6)]
    assert [each.step for each in left(tier, [Latest(2)])] == [10, 40, 50]
    newer = Checkpoint("sub/last.ckpt", "s6", 60)
    assert [each.step for each in left([*tier, newer], [Latest(2)])] == [50, 60]


@pytest.mark.parametrize("form", ["copy", "alias"])
def test_of_lasts_whose_names_differ_by_numbers_the_newest_stays(form):
    tier = []
    for epoch in range(1, 6):
        name = f"m--val_loss={1 / epoch:.2f}-epoch={epoch}"
        tier.append(Checkpoint(f"{name}.ckpt", f"s{epoch}", epoch * 10))
        kind = {"is_copy": True} if form == "copy" else {"alias_of": f"{name}.ckpt"}
        tier.append(Checkpoint(f"{name}-last.ckpt", f"s{epoch}", epoch * 10, **kind))
    mine = Checkpoint("keep=1.ckpt", "s1", 10, alias_of="m--val_loss=1.00-epoch=1.ckpt")
    names = {each.name for each in left([*tier, mine], [Latest(1)])}
    newest = "m--val_loss=0.20-epoch=5"
    assert names == {f"{newest}.ckpt", f"{newest}-last.ckpt", "keep=1.ckpt", "m--val_loss=1.00-epoch=1.ckpt"}


@pytest.mark.parametrize("form", FORMS)
def test_policies_may_be_written_in_code_and_yaml_and_survive_the_way_to_the_drain(form):
    config = TieredCheckpointConfig(dirpath="/d", retention=form)
    assert config.retention == tuple(FORMS[0])
    assert TieredCheckpointConfig.from_json(config.to_json()) == config
    assert TieredCheckpointConfig.from_any(config) == config and hash(config)
    if form is not FORMS[0]:
        assert TieredCheckpointConfig.from_any(OmegaConf.create({"dirpath": "/d", "retention": form})) == config
        assert TieredCheckpointConfig(dirpath="/d", retention=OmegaConf.create(form)) == config
        # Hydra puts a user's block over the package's own.
        whole = OmegaConf.merge(OmegaConf.load(DEFAULT), {"dirpath": "/d", "retention": form})
        assert TieredCheckpointConfig.from_any(whole) == config


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("latest", "retention is 'latest' — allowed: a mapping such as"),
        ({"lastest": 3}, "unknown key 'lastest' in retention — did you mean 'latest'?"),
        ({"latest": 0}, "latest is 0 — allowed: a whole number above 0"),
        ({"latest": True}, "latest is True"),
        ({"best": 3}, "retention.best is 3 — allowed: {best: 3, metric: val_loss, mode: min}"),
        ({"best": 3, "metric": "loss", "mode": "low"}, "mode is 'low' — allowed: min or max"),
        ({"best": 3, "metric": "${monitor}"}, "retention.metric is '${monitor}' — allowed: the name of a metric"),
        ({"best": 3, "metric": "???"}, "retention.metric is '???' — allowed: the name of a metric"),
        ({"latest": 3, "metric": "loss"}, "metric and mode beside best alone"),
        ([[]], "retention is [] — allowed"),
        ([{}], "retention is {} — allowed"),
    ],
)
def test_a_wrong_policy_is_refused_with_what_is_allowed(value, said):
    with pytest.raises(ConfigError) as error:
        TieredCheckpointConfig(dirpath="/d", retention=value)
    assert said in str(error.value)
