"""The papers' ablation tables: every variant is trained once, judged beside the paper's own tree,
and named as it names it.
"""

import numpy as np
import pandas as pd
import pytest
from fakes.traces import COSTS, round_costs, synthetic_trace

from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.policies import ltd, radar, resps
from specdec.policies.base import changed
from specdec.replays.replay import replay

from experiments import variants

SEEDS = {"seeds": (0, 1), "progress": False}


@pytest.fixture
def recording():
    trace = synthetic_trace(positions=16, depth=7, top_ks=(10,), most_nodes=70)
    trace.turns["part"] = np.resize(["train", "tune", "test"], len(trace.turns))
    return trace


class Trained:
    def __init__(self, policy):
        self.policy = policy


def test_the_size_policy_is_trained_alone_in_every_variant(recording, tmp_path, monkeypatch):
    configs = {}

    def train(trace, costs, config, *, seed, out_dir, progress):
        configs[out_dir.name] = config
        return Trained(Static(4, 2, 10))

    monkeypatch.setattr(variants, "train_ltd", train)
    tried = {
        "ours": {},
        "sees +hidden": {"size.parts": ltd.OBSERVATIONS["+hidden"]},
        "pi 1024": {"size.ppo.pi": (1024,)},
    }
    measured = (recording, round_costs(), tmp_path, tried)
    compared = variants.size_alone(*measured, base=ltd.OURS, **SEEDS)
    methods = [name for name in compared.table["method"].unique() if name in tried]
    assert methods == list(tried)
    assert set(configs) == {
        *("ours-0", "ours-1", "sees--hidden-0", "sees--hidden-1", "pi-1024-0", "pi-1024-1")
    }
    assert configs["pi-1024-0"].size.ppo.pi == (1024,)
    assert configs["ours-0"].size.features_size == 0
    assert configs["sees--hidden-0"].size.features_size == recording.features.shape[1]
    for config in configs.values():
        assert [part.learner for part in config.rounds] == ["size"]


def test_resps_stands_beside_the_papers_tree(recording, tmp_path, monkeypatch):
    trained = {}

    def train(trace, costs, config, *, seed, out_dir, progress):
        trained[out_dir.name] = config
        return Static(*((4, 2, 10) if config.ppo.ent_coef > 0.05 else (24, 2, 10)))

    monkeypatch.setattr(variants, "train_resps", train)
    monkeypatch.setitem(variants.PAPER_TREES, "resps", TreeConfig(8, 2, 10))
    options = {"changes": {"push_partial": True}, "widths": (8, 4), **SEEDS}
    table, turns = variants.resps_variants(recording, round_costs(), tmp_path, **options)
    named = ["Standard PPO + Feature Vector", "Max-Entropy PPO + Feature Vector"]
    assert table["row"].tolist() == named * 2
    assert table["width"].tolist() == [8, 8, 4, 4]
    assert len(trained) == 8
    assert {config.ppo.pi for config in trained.values()} == {(8, 8), (4, 4)}
    assert all(config.push_partial and config.state == "concat" for config in trained.values())
    assert (table["unique_actions"] == 1).all()
    assert table["over_eagle3"].gt(0).all()
    assert table["over_eagle3"][0] == table["over_eagle3"][2] != table["over_eagle3"][1]
    counts = turns.groupby(["row", "width", "seed"]).size()
    assert len(counts) == 8
    assert (counts == len(recording.select(part="test").turns)).all()


class Kept(Static):
    """A static tree with an interval, which replay need not know."""

    def with_settings(self, interval):
        return Kept(4 if interval == 1 else 16, 2, 10)


def test_the_sweep_counts_all_turns_once_per_seed(recording):
    measured = (recording, round_costs())
    two = [Kept(4, 2, 10)] * 2
    sweep, turns = variants.interval_sweep(*measured, two, (1, 10), progress=False)
    once, _ = variants.interval_sweep(*measured, two[:1], (1, 10), progress=False)
    columns = ["interval", "seconds", "tok_per_s"]
    pd.testing.assert_frame_equal(sweep[columns], once[columns])
    assert sweep["interval"].tolist() == [1, 10]
    assert sweep["seconds"].nunique() == 2
    assert turns.groupby("interval")["time_ms"].sum().tolist() == (2e3 * sweep["seconds"]).tolist()


def test_radars_grid_trains_every_point_once(recording, tmp_path, monkeypatch):
    configs = {}

    def train(trace, costs, config, *, seed, out_dir):
        configs[out_dir.name] = config
        return Trained(Static(4, 2 if config.alpha > 0.03 else 6, 10))

    monkeypatch.setattr(variants, "train_radar", train)
    grid = {"alpha": (0.02, 0.04), "gamma": (0.9, 1.0)}
    measured = (recording, round_costs(), tmp_path, radar.PAPER, grid)
    table = variants.radar_grid(*measured, **SEEDS)
    assert len(configs) == len(table) == 8
    assert configs["alpha-0.02-gamma-0.9-1"].gamma == 0.9
    points = table[["alpha", "gamma"]].drop_duplicates().values.tolist()
    assert points == [[0.02, 0.9], [0.02, 1.0], [0.04, 0.9], [0.04, 1.0]]
    assert (table.loc[table["alpha"] == 0.04, "draft_calls"] == 3).all()
    assert table.loc[table["alpha"] == 0.02, "draft_calls"].gt(3).all()


class Drawing(Static):
    """A static tree that may be told how to draw its answers."""

    def __init__(self, *tree):
        super().__init__(*tree)
        self.asked = []

    def with_settings(self, **settings):
        self.asked.append(settings)
        return self


def test_the_training_phase_is_of_the_questions_that_were_learned_from(recording):
    trees = [Drawing(4, 2, 10), Drawing(16, 3, 10)]
    config = changed(resps.OURS, {"while_training": {"interval": 3, "temperature": None}})
    phase = variants.training_phase(recording, COSTS, config, trees)
    for tree in trees:
        assert tree.asked == [{"interval": 3, "temperature": 1.0}]
    train = recording.select(part="train")
    cycles = sum(len(replay(train, tree, COSTS, keep_cycles=True).cycles) for tree in trees)
    (row,) = phase[["method", "suite", "turns", "cycles", "unique_actions"]].values.tolist()
    assert row == ["Training phase", "all", 2 * len(train.turns), cycles, 2]
    assert phase["rounds_per_turn"].tolist() == pytest.approx([cycles / 2 / len(train.turns)])
