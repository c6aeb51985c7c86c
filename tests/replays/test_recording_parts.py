"""What a recording is asked for, what it refuses, what its files say, and how its columns are cut,
joined and kept.
"""

import pickle

import numpy as np
import pytest
from fakes.pairs import shared_pair
from fakes.traces import round_costs, synthetic_trace

from specdec import runs
from specdec.core import clock
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.protocols import Drafter
from specdec.core.tree_config import TreeConfig
from specdec.data.suites import describe_items, gather
from specdec.errors import SpecdecError
from specdec.models.fingerprint import describe_pair
from specdec.replays import record as record_module
from specdec.replays import replay as replay_module
from specdec.replays import trace
from specdec.replays.columns import Column, column_of, read_columns, stacked, write_columns
from specdec.replays.record import (
    RecordConfig,
    check,
    parted_items,
    record,
    record_config,
    settings_of,
)
from specdec.replays.replay import ReplayClock, answer_ms, replay
from specdec.replays.static_trees import static_turns
from specdec.replays.trace import NEVER, Trace, open_trace

FEW = dict(max_new_tokens=12, depth=3, top_ks=(2,), trees=(3,), most_nodes=20)


def test_settings_unless_told_otherwise_and_those_at_the_edge_are_not_refused():
    usual = RecordConfig()
    assert repr(usual) == (
        "RecordConfig(max_new_tokens=128, depth=12, top_ks=(8, 10, 12, 16, 20, 32), trees=(10,), family=(), most_nodes=240, "  # noqa: E501
        "temperature=0.0, seed=0, features=True, acceptance_distributions=0, limit=None, train_limit=None, part='test', "  # noqa: E501
        "folder=None, name='record', scale='laptop', progress=True, on=None, jobs=None)"
    )
    names = "max_new_tokens depth most_nodes seed features temperature top_ks trees lengths".split()
    numbers = [128, 12, 240, 0, True, 0.0, (8, 10, 12, 16, 20, 32), (10,), 0]
    assert usual.recorded == dict(zip(names, numbers, strict=True))
    config = RecordConfig(
        top_ks=(5, 2),
        trees=(3, 2),
        family=(4, 2),
        temperature=1,
        seed=3,
        acceptance_distributions=6,
    )
    told = dict(seed=3, temperature=1.0, top_ks=(2, 3, 5), trees=(2, 3), family=(4, 2), lengths=6)
    assert config.widths == (2, 3, 5) and config.recorded == usual.recorded | told
    assert type(config.recorded["temperature"]) is float
    made = record_config(RecordConfig(seed=4), {"lengths": 2, "depth": 9})
    assert made == RecordConfig(seed=4, depth=9, acceptance_distributions=2)

    def pair_of(**fields):
        drafter = Drafter()
        vars(drafter).update(fields)
        return Pair(shared_pair().target, drafter)

    edge = dict(depth=1, most_nodes=1, limit=1, top_ks=(1,), trees=(), part="train", family=(1, 1))
    check(shared_pair(), RecordConfig(**edge))
    radars = dict(depth=7, top_ks=(), acceptance_distributions=1, most_nodes=NEVER - 1, part="tune")
    check(shared_pair(), RecordConfig(**radars))
    check(shared_pair(), RecordConfig(top_ks=(), trees=(2,)))
    check(pair_of(deepest=3), RecordConfig(depth=3))
    check(pair_of(copied_levels=5), RecordConfig(depth=4))
    for forwards in (True, False):
        drafter = pair_of(copied_levels=5, forwards=forwards).drafter
        assert record_module.copies_of(drafter) == {"copies": {"levels": 5, "forwards": forwards}}
    assert record_module.copies_of(Drafter()) == {}
    # of RADAR's distributions: its trees have ten children and seven levels
    usual = record_module.usual_lengths
    assert usual(shared_pair(), (4, 10), 7) == record_module.USUAL_LENGTHS == 16
    assert usual(shared_pair(), (4, 8), 12) == usual(shared_pair(), (10,), 6) == 0
    assert usual(pair_of(copied_levels=5), (10,), 12) == 0


def test_prompts_go_into_parts_and_those_of_a_recording_into_the_same(monkeypatch):
    made = synthetic_trace(turns=3)
    items = gather("toy/nq", limit=3)
    made.turns["suite"], made.turns["prompt"] = "toy/nq", [items[2].id, items[0].id, items[0].id]
    made.turns["part"], made.turns["turn"] = ["tune", "train", "train"], [0, 0, 1]
    assert parted_items(made, RecordConfig()) == [("tune", items[2]), ("train", items[0])]
    made.header |= dict(trees=[3], family=[3, 2], seed=4, max_new_tokens=7, pair="left out")
    again = dict(
        max_new_tokens=7, depth=4, top_ks=(3,), trees=(3,), family=(3, 2), most_nodes=20, seed=4
    )
    assert settings_of(made) == again
    del made.header["family"]
    assert "family" not in settings_of(made)
    asked = []

    def gathered(prompts, **named):
        asked.append((prompts, named))
        return gather({"s": [f"{len(asked)}, one", f"{len(asked)}, two"]})

    def parted(prompts, **settings):
        asked.clear()
        return parted_items(prompts, RecordConfig(**settings))

    monkeypatch.setattr(record_module, "gather", gathered)
    where = dict(folder="here", seed=3)
    parts = ("train", "tune", "test")
    found = parted("toy/nq", limit=10, **where)
    assert asked == [
        (["toy/nq"], dict(limit=n, part=part, **where))
        for part, n in zip(parts, (4, 2, 4), strict=True)
    ]
    texts = [
        (part, f"{number}, {word}")
        for number, part in enumerate(parts, 1)
        for word in ("one", "two")
    ]
    assert [(part, item.turns[0]) for part, item in found] == texts
    for settings, limits in ((dict(limit=1), [1, 1, 1]), (dict(train_limit=9), [9, None, None])):
        parted(["toy/nq"], **settings)
        assert [named["limit"] for _, named in asked] == limits
    for prompts in ({"mine": ["a"]}, [[1, 2]]):
        found = parted(prompts, limit=5, part="tune", **where)
        assert asked == [(prompts, dict(limit=5, **where))]
        assert [part for part, _ in found] == ["tune", "tune"]


def test_the_header_and_the_tables_say_what_they_hold(home, monkeypatch):
    pair = shared_pair()
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    found = record(pair, prompts, progress=False, part="tune", seed=2, name="mine", **FEW)
    (run,) = runs.find("mine")
    items = describe_items(gather(prompts))
    own = RecordConfig(seed=2, **FEW).recorded
    kinds = ["context_tok", "draft_state", "features", "root_rank", "root_scores", "text"]
    positions = sorted([*map(Column, kinds), Column("ranks", 2), Column("ranks", 3)])
    trees = [Column(kind, 3) for kind in ("beams", "scores", "tokens")]
    listed = {"positions": positions, "trees": trees, "family": []}
    columns = {table: [column.stored for column in columns] for table, columns in listed.items()}
    keys = {"schema": 1, "key": run.key, "pair_key": describe_pair(pair)["weights"], "items": items}
    header = {
        **keys,
        **describe_pair(pair),
        **own,
        "position_limit": pair.target.position_limit,
        "columns": columns,
    }
    beyond = {name: value for name, value in found.header.items() if name not in runs.plain(header)}
    assert found.header == runs.plain(header) | beyond and beyond.keys() == {"checksum", "files"}
    shards = [
        f"{table}/part-{number:05d}.parquet"
        for table in ("positions", "trees")
        for number in range(2)
    ]
    assert sorted(beyond["files"]) == [*shards, "turns.parquet"]
    numbers = ["suite", "prompt", "turn", "part", "prompt_tok", "positions", "piece", "first"]
    assert sorted(found.turns) == sorted([*numbers, "kept_tok", "ids"])
    kept = found.turns["kept_tok"].tolist()
    assert found.turns[numbers].values.tolist() == [
        ["prompts", "prompts/0", 0, "tune", 3, kept[0] - 1, 0, 0],
        ["prompts", "prompts/1", 0, "tune", 4, kept[1] - 1, 1, kept[0] - 1],
    ]
    for ids, prompt, count in zip(found.turns["ids"], prompts, kept, strict=True):
        assert ids[: len(prompt)].tolist() == prompt and len(ids) == len(prompt) + count
    assert run.record()["results"] == {"positions": sum(kept) - 2, "turns": 2}
    assert run.record()["config"] == runs.plain(
        {"schema": 1, "pair": describe_pair(pair), "items": items, **own}
    )
    monkeypatch.setattr("specdec.machine.code_hash", lambda: "of other code")
    record(pair, prompts, progress=False, part="tune", seed=2, name="mine", **FEW)
    assert runs.find("mine")[1:] == [], "a recording is found again when the code has changed"
    again = pickle.loads(pickle.dumps(found))
    assert again.turns.equals(found.turns) and (again.ranks[3] == found.ranks[3]).all()
    half = pickle.loads(pickle.dumps(found.select(np.array([False, True]))))
    assert half.turns["prompt"].tolist() == ["prompts/1"]
    assert half.column("text")[0, 0] == found.text[kept[0] - 1, 0]


def test_columns_come_back_as_they_were(tmp_path):
    columns = {
        Column("ranks", 3): np.arange(24, dtype=np.int16).reshape(3, 2, 4),
        Column("scores", 3): np.array([[0.5, -np.inf], [1.5, 2.0], [0.25, 3.0]], np.float32),
        Column("ranks", 4, (2, 1)): np.array([7, 8, 9], np.int16),
        Column("family_beam", level=0): np.array([[1], [2], [3]], np.int16),
        Column("context_tok"): np.array([4, 5, 6], np.int32),
        Column("half"): np.array([1, 2, 3], np.float16),
    }
    path = write_columns(tmp_path / "part.parquet", columns)
    some = [Column("ranks", 3), Column("half")]
    for found, listed in ((read_columns(path), list(columns)), (read_columns(path, some), some)):
        assert list(found) == listed
        for column, array in found.items():
            assert array.dtype == columns[column].dtype
            assert array.tolist() == columns[column].tolist()
    wide = stacked([np.ones((1, 2), np.float32), np.ones((2, 3), np.float32)])
    assert wide.tolist() == [[1, 1, -np.inf], [1, 1, 1], [1, 1, 1]]
    assert stacked([np.ones((1, 1), int), np.zeros((1, 2), int)]).tolist() == [[1, -1], [0, 0]]
    assert stacked([np.ones(1), np.zeros(2)]).tolist() == [1, 0, 0]
    beam = Column("ranks", 4, (2, 1))
    assert column_of(beam.stored) == beam and column_of({"kind": "text"}) == Column("text")


def test_a_selection_is_a_recording_of_its_own(home, tmp_path):
    found = record(shared_pair(), [[1, 2, 3], [4, 5, 6, 7]], progress=False, **FEW)
    half = found.select(np.array([False, True]))
    folder = trace.save_trace(half, tmp_path / "half")
    again = open_trace(folder, "random")
    assert again.turns["prompt"].tolist() == ["prompts/1"] and again.turns["piece"].tolist() == [0]
    widths = [("ranks", 2), ("ranks", 3), ("scores", 3), ("tokens", 3), ("beams", 3)]
    for column in (*widths, ("features",), ("draft_state",), ("text",), ("root_rank",)):
        assert (again.column(*column) == half.column(*column)).all()
    assert again.header["family"] == []
    assert again.header["lengths"] == 0
    assert "family" not in again.header["columns"]
    pytest.raises(SpecdecError, again.column, "root_scores").match("holds no root_scores")
    trace.save_trace(half, tmp_path / "less", leave_out=("scores", "tokens", "beams"))
    assert open_trace(tmp_path / "less").header["columns"]["trees"] == []
    assert not (tmp_path / "less" / "trees").exists()
    both = trace.joined([half, again], 3)
    assert both.turns["first"].tolist() == [0, len(half)]
    assert len(both) == 2 * len(half)
    assert both.header["family"] == ()
    for column in (("context_tok",), ("ranks", 3), ("scores", 3), ("features",), ("draft_state",)):
        assert (both.column(*column) == np.concatenate([half.column(*column)] * 2)).all()
    assert both.top_ks == (3,)
    shallow = again.restrict({"expansions": (0, 2), "verify_nodes": (0, 15)})
    less = trace.joined([half, shallow], 3)
    assert (less.depth, less.most_nodes) == (2, 15) and less.ranks[3].shape[1:] == (3, 3)
    assert less.column("scores", 3).shape[1] == 3 + 2 * 9


def test_selected_turns_keep_their_rows_what_was_not():
    made = synthetic_trace(turns=4, positions=5)
    distributions = np.array([1, 6, 9, 17]), np.arange(4 * 72, dtype=np.float32).reshape(4, 8, 9)
    made = Trace(made.header, made.turns, made._columns, None, distributions)
    some = made.select(np.array([False, True, False, True]))
    rows = [*range(5, 10), *range(15, 20)]
    assert some.turns["first"].tolist() == [0, 5] and some.turns["prompt"].tolist() == ["p1", "p3"]
    assert some.turns.index.tolist() == [0, 1] and len(some) == 10
    assert (some.ranks[3] == made.ranks[3][rows]).all()
    assert (some.context_tok == made.context_tok[rows]).all()
    found, chances = some.acceptance_distributions
    assert found.tolist() == [1, 4, 7] and (chances == distributions[1][1:]).all()
    assert made.select(part="train").turns["part"].tolist() == ["train", "train"]
    assert repr(some) == "Trace(2 turns, 10 positions, k in (3,), depth 4)"
    beside = some.beside("text_state", np.zeros((10, 2)), "made up")
    assert beside.header["text_state"] == "made up" and beside.column("text_state").shape == (10, 2)
    assert "text_state" not in some.header
    assert beside.acceptance_distributions is some.acceptance_distributions
    with pytest.raises(AssertionError, match="a row for each position"):
        some.beside("text_state", np.zeros((9, 2)), "made up")
    made = synthetic_trace(depth=4, top_ks=(2, 3), most_nodes=20)
    cut = made.restrict({"top_k": (3, 9), "expansions": (1, 2), "verify_nodes": (4, 15)})
    assert (cut.top_ks, cut.depth, cut.most_nodes) == ((3,), 2, 15) and cut.header["top_ks"] == (3,)
    trees = cut.trees(3)
    whole = made.trees(3)
    assert (trees.scores == whole.scores[:, : 3 + 18]).all()
    assert (trees.tokens == whole.tokens[:, : 3 + 18]).all()
    assert (trees.beams == whole.beams[:, :2]).all()
    assert (cut.ranks[3] == made.ranks[3][:, :3, :3]).all()
    assert (cut.root_rank == made.root_rank).all() and (cut.features == made.features).all()
    assert made.restrict({}) is made
    assert made.restrict({"expansions": (0, 9), "verify_nodes": (0, 99)}) is made
    assert made.restrict({"verify_nodes": (0, 9)}).depth == 4
    costs = round_costs()
    part = dict(part="test")
    for one, other in ((cut, made), (cut.select(**part), made.select(**part))):
        assert static_turns(one, costs, TreeConfig(10, 2, 3)).equals(
            static_turns(other, costs, TreeConfig(10, 2, 3))
        )
    pytest.raises(SpecdecError, static_turns, cut, costs, TreeConfig(10, 3, 3)).match("from 0 to 2")
    made = synthetic_trace(turns=2, positions=10)
    for expansions, nodes in ((0, 1), (2, 7), (4, 20)):
        expected = [sum(rank < nodes for rank in row[expansions]) for row in made.ranks[3].tolist()]
        assert made.accepted_tok(np.arange(20), 3, expansions, nodes).tolist() == expected
    assert made.candidates(3, 2) == 3 + 18
    assert made.depth_of(3) == 4 and made.depth_of(2) == made.depth_of(3, (1,)) == -1
    trace.check_recorded(made, 3, 4, 20)
    trace.check_recorded(made)
    bare = Trace({**made.header, "features": False}, made.turns, made._columns)
    assert bare.features is None and bare.draft_state is None and made.features is not None


def test_a_replayed_cycle_takes_what_was_charged_and_a_row_per_turn_is_whole():
    watch = ReplayClock(0.5)
    watch.draft_ms = 3.0
    watch.verify_ms = 4.0
    watch.rest_ms = 0.25
    watch.lap("policy")
    watch.mark()
    watch.lap("policy")
    parts = dict(
        draft_ms=3.0, policy_ms=1.0, verify_ms=4.0, commit_ms=0.0, host_ms=0.25, total_ms=8.25
    )
    assert watch.stop() == parts
    watch.start()
    assert watch.stop() == dict.fromkeys(parts, 0.0)
    made = synthetic_trace(turns=2, positions=10)
    costs = round_costs(root_per_tok=(0.5, 0.5), step_per_tok=0.25)
    found = replay(made, Static(8, 2, 3), costs, keep_cycles=True)
    names = [
        "suite",
        "prompt",
        "turn",
        "part",
        "cycles",
        "new_tok",
        "cycle_tok",
        "draft_calls",
        "verified_tok",
    ]
    assert list(found.table) == [*names, "accepted_tok", "time_ms", "policy_ms", "plain_ms"]
    row = found.table.iloc[0]
    cycles = found.cycles[found.cycles["prompt"] == "p0"]
    assert row[["suite", "prompt", "turn", "part", "new_tok"]].tolist() == [
        "easy",
        "p0",
        0,
        "train",
        10,
    ]
    assert row["cycles"] == len(cycles) and row["cycle_tok"] == cycles["new_tok"].sum() >= 10
    assert row[["draft_calls", "verified_tok"]].tolist() == [3 * len(cycles), 8 * len(cycles)]
    assert row["accepted_tok"] == cycles["accepted_tok"].sum() == row["cycle_tok"] - len(cycles)
    # A root pass of 1 ms and a half for each token before it, two expansions of 0.5, 4 + 7 / 10 for
    # 7 nodes, the rest.
    expected = len(cycles) * (1 + 1 + 4.7 + 0.25) + 0.5 * cycles["context_tok"].sum()
    assert row["time_ms"] == pytest.approx(expected) and row["policy_ms"] == 0
    context = made.turns["prompt_tok"][0] + np.arange(10)
    assert row["plain_ms"] == pytest.approx((4.0 + 0.25 * context).sum())
    assert list(found.cycles)[:3] == ["suite", "prompt", "turn"]
    assert len(found.cycles) == found.table["cycles"].sum()
    assert replay(made, Static(8, 2, 3), costs).rows == [[], []]


def test_an_answer_takes_the_mean_without_the_slowest_twentieth(monkeypatch):
    made = synthetic_trace(turns=6)
    played = []

    def replayed(some, policy, costs):
        played.append((some.turns["prompt"].tolist(), policy.others.tolist(), costs))
        for _ in range(40):
            policy.answer(None)

    answers = iter([*[1.0] * 19, 100.0, *[3.0] * 19, 50.0])
    moment = [0.0]

    class Slow(Static):
        def answer(self, question):
            moment[0] += next(answers)

    monkeypatch.setattr(replay_module, "replay", replayed)
    costs = round_costs()
    with clock.counted_by(lambda: moment[0]):
        found = answer_ms(made, Slow(4, 2, 3), costs, turns=2, others_mb=2**-16)
    assert found == pytest.approx(1e3 * 2.0) and played == [(["p0", "p1"], [1.0] * 4, costs)]
    monkeypatch.setattr(
        replay_module, "replay", lambda some, *given: played.append((len(some.turns), given))
    )
    assert answer_ms(made, Static(4, 2, 3), costs) == 0.0
    (count, (timed, _)) = played[1]
    assert count == 4 and timed.others.nbytes == 8 * 2**20 and timed.plan == TreeConfig(4, 2, 3)
