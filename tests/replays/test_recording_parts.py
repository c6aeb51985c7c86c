"""What a recording is asked for, what its files say, and how its columns are cut and joined."""

import pickle

import numpy as np
import pytest
from fakes.pairs import shared_pair
from fakes.traces import round_costs, synthetic_trace

from specdec import runs
from specdec.core import clock
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.data.suites import describe_items, gather
from specdec.errors import SpecdecError
from specdec.models.pairs import describe_pair
from specdec.replays import record as record_module
from specdec.replays import replay as replay_module
from specdec.replays import trace
from specdec.replays.record import RecordConfig, parted_items, record, settings_of
from specdec.replays.replay import ReplayClock, answer_ms, replay
from specdec.replays.static_trees import static_turns
from specdec.replays.trace import Column, Trace, column_of, read_columns, stacked, write_columns

FEW = dict(max_new_tokens=12, depth=3, top_ks=(2,), trees=(3,), most_nodes=20)


def test_recorded_settings_are_the_ones_numbers_depend_on():
    usual = RecordConfig()
    names = "max_new_tokens depth most_nodes seed features temperature top_ks trees lengths".split()
    numbers = [128, 12, 240, 0, True, 0.0, (8, 10, 12, 16, 20, 32), (10,), 0]
    assert usual.recorded == dict(zip(names, numbers, strict=True))
    widths = dict(top_ks=(5, 2), trees=(3, 2), family=(4, 2))
    config = RecordConfig(**widths, temperature=1, lengths=6)
    changed = dict(temperature=1.0, top_ks=(2, 3, 5), trees=(2, 3), family=(4, 2), lengths=6)
    changed["noise"] = trace.OWN_NOISE
    assert config.recorded == usual.recorded | changed
    assert type(config.recorded["temperature"]) is float, "1 and 1.0 are one key"
    # RADAR's trees have ten children and seven levels
    lengths = record_module.usual_lengths
    assert lengths(shared_pair(), (4, 10), 7) == record_module.USUAL_LENGTHS
    assert lengths(shared_pair(), (4, 8), 12) == lengths(shared_pair(), (10,), 6) == 0


def test_prompts_of_a_recording_go_into_the_same_parts():
    made = synthetic_trace(turns=3)
    items = gather("toy/nq", limit=3)
    made.turns["suite"] = "toy/nq"
    made.turns["prompt"] = [items[2].id, items[0].id, items[0].id]
    made.turns["part"] = ["tune", "train", "train"]
    assert parted_items(made, RecordConfig()) == [("tune", items[2]), ("train", items[0])]
    made.header |= dict(trees=[3], family=[3, 2], seed=4, max_new_tokens=7, pair="left out")
    again = dict(max_new_tokens=7, depth=4, top_ks=(3,), trees=[3], family=[3, 2])
    assert settings_of(made) == again | dict(most_nodes=20, seed=4)
    assert settings_of(synthetic_trace(turns=3))["family"] == ()


@pytest.mark.parametrize(
    ("settings", "counts"), [(dict(limit=1), (1, 1, 1)), (dict(limit=5, train_limit=3), (3, 1, 2))]
)
def test_named_suites_are_split(settings, counts):
    parted = parted_items(["toy/nq"], RecordConfig(**settings))
    for part, count in zip(("train", "tune", "test"), counts, strict=True):
        items = [item for name, item in parted if name == part]
        assert items == gather("toy/nq", part=part, limit=count) and len(items) == count


def test_other_prompts_are_of_one_part_or_split():
    prompts = {"mine": [f"Question {number}" for number in range(60)]}
    parted = parted_items(prompts, RecordConfig(limit=5, part="tune"))
    assert [(part, item.turns[0]) for part, item in parted] == [
        ("tune", text) for text in prompts["mine"][:5]
    ]
    parted = parted_items(prompts, RecordConfig(part="split"))
    assert {part for part, _ in parted} == {"train", "tune", "test"} and len(parted) == 60
    few = {"mine": prompts["mine"][:1]}
    pytest.raises(SpecdecError, parted_items, few, RecordConfig(part="split")).match("give more")


def test_the_header_and_the_tables_say_what_they_hold(home):
    pair = shared_pair()
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    recording = record(pair, prompts, progress=False, part="tune", seed=2, name="mine", **FEW)
    (run,) = runs.find("mine")
    # 1. the header
    kinds = ["context_tok", "draft_state", "features", "root_rank", "root_scores", "text"]
    positions = sorted([*map(Column, kinds), Column("ranks", 2), Column("ranks", 3)])
    trees = [Column(kind, 3) for kind in ("beams", "scores", "tokens")]
    columns = {"positions": positions, "trees": trees, "family": []}
    for table in columns:
        entries = recording.header["columns"][table]
        assert [column_of(entry) for entry in entries] == columns[table]
    facts = {"schema": 1, "key": run.key, "pair_key": describe_pair(pair)["weights"]}
    facts |= {"items": describe_items(gather(prompts)), **RecordConfig(seed=2, **FEW).recorded}
    assert {name: recording.header[name] for name in facts} == runs.plain(facts)
    files = recording.header["files"]
    assert len(files) == 5 and "trees/part-00001.parquet" in files
    # 2. the turns
    kept = recording.turns["kept_tok"].tolist()
    names = ["suite", "prompt", "turn", "part", "prompt_tok", "positions", "piece", "first"]
    assert recording.turns[names].values.tolist() == [
        ["prompts", "prompts/0", 0, "tune", 3, kept[0] - 1, 0, 0],
        ["prompts", "prompts/1", 0, "tune", 4, kept[1] - 1, 1, kept[0] - 1],
    ]
    for ids, prompt, count in zip(recording.turns["ids"], prompts, kept, strict=True):
        assert ids[: len(prompt)].tolist() == prompt and len(ids) == len(prompt) + count
    assert run.record()["results"] == {"positions": sum(kept) - 2, "turns": 2}
    # 3. another process opens it again
    again = pickle.loads(pickle.dumps(recording))
    assert again.turns.equals(recording.turns) and (again.ranks[3] == recording.ranks[3]).all()
    half = pickle.loads(pickle.dumps(recording.select(np.array([False, True]))))
    assert half.turns["prompt"].tolist() == ["prompts/1"]
    assert half.column("text")[0, 0] == recording.text[kept[0] - 1, 0]


def test_columns_come_back_as_they_were(tmp_path):
    columns = {
        Column("ranks", 3): np.arange(24, dtype=np.int16).reshape(3, 2, 4),
        Column("scores", 3): np.array([[0.5, -np.inf], [1.5, 2.0], [0.25, 3.0]], np.float32),
        Column("ranks", 4, (2, 1)): np.array([7, 8, 9], np.int16),
        Column("family_beam", level=0): np.array([[1], [2], [3]], np.int16),
        Column("half"): np.array([1, 2, 3], np.float16),
    }
    path = write_columns(tmp_path / "part.parquet", columns)
    two = [Column("ranks", 3), Column("half")]
    assert list(read_columns(path, two)) == two and read_columns(path).keys() == columns.keys()
    for column, array in read_columns(path).items():
        assert array.dtype == columns[column].dtype
        assert array.tolist() == columns[column].tolist()
    wide = stacked([np.ones((1, 2), np.float32), np.ones((2, 3), np.float32)])
    assert wide.tolist() == [[1, 1, -np.inf], [1, 1, 1], [1, 1, 1]]
    assert stacked([np.ones((1, 1), int), np.zeros((1, 2), int)]).tolist() == [[1, -1], [0, 0]]
    beam = Column("ranks", 4, (2, 1))
    names = [beam.name, Column("family_beam", level=3).name, Column("text").name]
    assert names == ["ranks_4,2,1", "family_beam_3", "text"]
    assert column_of(beam.stored) == beam and column_of({"kind": "text"}) == Column("text")


def test_recordings_are_joined_as_deep_as_all(home):
    recording = record(shared_pair(), [[1, 2, 3], [4, 5, 6, 7]], progress=False, **FEW)
    half = recording.select(np.array([False, True]))
    pytest.raises(SpecdecError, half.column, "text_state").match("holds no text_state")
    # joined with another one of the pair, as deep as both
    both = trace.joined([half, half], 3)
    assert both.turns["first"].tolist() == [0, len(half)] and both.top_ks == (3,)
    for column in (("context_tok",), ("ranks", 3), ("scores", 3), ("features",), ("draft_state",)):
        assert (both.column(*column) == np.concatenate([half.column(*column)] * 2)).all()
    shallow = half.restrict({"expansions": (0, 2), "verify_nodes": (0, 15)})
    less = trace.joined([half, shallow], 3)
    assert (less.depth, less.most_nodes) == (2, 15) and less.ranks[3].shape[1:] == (3, 3)
    assert less.column("scores", 3).shape[1] == 3 + 2 * 9


def test_selected_turns_keep_their_rows():
    made = synthetic_trace(turns=4, positions=5)
    distributions = np.array([1, 6, 9, 17]), np.arange(4 * 72, dtype=np.float32).reshape(4, 8, 9)
    made = Trace(made.header, made.turns, made._columns, None, distributions)
    part = made.select(np.array([False, True, False, True]))
    rows = [*range(5, 10), *range(15, 20)]
    assert part.turns["first"].tolist() == [0, 5] and part.turns["prompt"].tolist() == ["p1", "p3"]
    assert len(part) == 10 and part.turns.index.tolist() == [0, 1]
    assert (part.ranks[3] == made.ranks[3][rows]).all()
    places, chances = part.acceptance_distributions
    assert places.tolist() == [1, 4, 7] and (chances == distributions[1][1:]).all()
    assert made.select(part="train").turns["part"].tolist() == ["train", "train"]


def test_a_restriction_cuts_the_trees():
    made = synthetic_trace(depth=4, top_ks=(2, 3), most_nodes=20)
    cut = made.restrict({"top_k": (3, 9), "expansions": (1, 2), "verify_nodes": (4, 15)})
    assert (cut.top_ks, cut.depth, cut.most_nodes) == ((3,), 2, 15) and cut.header["top_ks"] == (3,)
    whole = made.trees(3)
    assert (cut.trees(3).scores == whole.scores[:, : 3 + 18]).all()
    assert (cut.trees(3).tokens == whole.tokens[:, : 3 + 18]).all()
    assert (cut.trees(3).beams == whole.beams[:, :2]).all()
    assert (cut.ranks[3] == made.ranks[3][:, :3, :3]).all()
    assert (cut.root_rank == made.root_rank).all() and (cut.features == made.features).all()
    assert made.restrict({"expansions": (0, 9), "verify_nodes": (0, 99)}) is made
    costs = round_costs()
    tree = TreeConfig(10, 2, 3)
    assert static_turns(cut, costs, tree).equals(static_turns(made, costs, tree))
    pytest.raises(SpecdecError, static_turns, cut, costs, TreeConfig(10, 3, 3)).match("from 0 to 2")
    for expansions, nodes in ((0, 1), (2, 7), (4, 20)):
        expected = [sum(rank < nodes for rank in row[expansions]) for row in made.ranks[3].tolist()]
        rows = np.arange(len(made))
        assert made.accepted_tok(rows, 3, expansions, nodes).tolist() == expected
    assert made.candidates(3, 2) == 3 + 18
    assert made.depth_of(3) == 4 and made.depth_of(5) == made.depth_of(3, (1,)) == -1


def test_a_replayed_cycle_takes_what_was_charged_and_a_row_per_turn_is_whole():
    watch = ReplayClock(0.5)
    watch.draft_ms, watch.verify_ms, watch.rest_ms = 3.0, 4.0, 0.25
    watch.lap("policy")
    watch.lap("policy")
    parts = dict(draft_ms=3.0, policy_ms=1.0, verify_ms=4.0, commit_ms=0.0, host_ms=0.25)
    assert watch.stop() == parts | {"total_ms": 8.25}
    made = synthetic_trace(turns=2, positions=10)
    costs = round_costs(root_per_tok=(0.5, 0.5), step_per_tok=0.25)
    replayed = replay(made, Static(8, 2, 3), costs, keep_cycles=True)
    row = replayed.table.iloc[0]
    cycles = replayed.cycles[replayed.cycles["prompt"] == "p0"]
    assert row["cycles"] == len(cycles) and row["cycle_tok"] == cycles["new_tok"].sum() >= 10
    assert row[["draft_calls", "verified_tok"]].tolist() == [3 * len(cycles), 8 * len(cycles)]
    assert row["accepted_tok"] == cycles["accepted_tok"].sum() == row["cycle_tok"] - len(cycles)
    # a root pass of 1 ms and a half for each token before it, two expansions of 0.5, 4 + 7 / 10 for
    # 7 nodes, the rest
    expected = len(cycles) * (1 + 1 + 4.7 + 0.25) + 0.5 * cycles["context_tok"].sum()
    assert row["time_ms"] == pytest.approx(expected) and row["policy_ms"] == 0
    context = made.turns["prompt_tok"][0] + np.arange(10)
    assert row["plain_ms"] == pytest.approx((4.0 + 0.25 * context).sum())
    assert len(replayed.cycles) == replayed.table["cycles"].sum()
    assert replay(made, Static(8, 2, 3), costs).rows == [[], []]


def test_an_answer_takes_the_mean_without_the_slowest_twentieth(monkeypatch):
    answers = iter([*[1.0] * 19, 100.0, *[3.0] * 19, 50.0])
    moment = [0.0]
    played = []

    class Slow(Static):
        def answer(self, question):
            moment[0] += next(answers)

    def replayed(part, policy, costs):
        played.append(part.turns["prompt"].tolist())
        for _ in range(40):
            policy.answer(None)

    monkeypatch.setattr(replay_module, "replay", replayed)
    with clock.counted_by(lambda: moment[0]):
        mean_ms = answer_ms(synthetic_trace(turns=6), Slow(4, 2, 3), round_costs(), turns=2)
    assert mean_ms == pytest.approx(1e3 * 2.0) and played == [["p0", "p1"]]
