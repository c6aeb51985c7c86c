"""The explorer without a browser: what it draws, and what its traits do."""

import itertools
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

import specdec
from specdec.core.policy import Policy, Static
from specdec.core.tree_config import TreeConfig
from specdec.costs.profiles import profile
from specdec.errors import SpecdecError
from specdec.replays import snapshots
from specdec.report import explorer_panels as panels
from specdec.report.explorer import explore, shipped_policies


@pytest.fixture(scope="module")
def explorer():
    return explore()


@pytest.fixture(scope="module")
def recording(explorer):
    return explorer.recording


@pytest.fixture(scope="module")
def pair():
    return specdec.load_pair("tiny", dtype="float32")


def boxes(panel, *kinds):
    return [
        shape for shape in panel.shapes if shape.get("data-tip") and shape["data-kind"] in kinds
    ]


def reach(shape):
    """The left, top, right and bottom of a rectangle or a text."""
    x, y, size = shape["x"], shape["y"], shape.get("font-size")
    if size:
        return x, y - 0.75 * size, x + panels.wide(shape["words"], size), y + 0.2 * size
    return x, y, x + shape["width"], y + shape["height"]


def overlap(*shapes):
    first, second = map(reach, shapes)
    return all(first[i] < second[i + 2] and second[i] < first[i + 2] for i in (0, 1))


def test_the_shipped_recording_is_whole(recording):
    assert len(recording.prompts) == 6
    assert recording.top_ks == [2, 4, 10]
    tokens = {int(token) for token in recording.trace.trees(10).tokens.ravel()}
    assert tokens <= set(recording.texts)


def test_the_usual_tree_is_as_wide_as_the_recording():
    trace = SimpleNamespace(depth=2, header={"pair": "nobody's", "dtype": "float32"})
    policies = shipped_policies(SimpleNamespace(trace=trace, top_ks=[2, 3]))
    assert policies["fixed 22,2,3"].plan == TreeConfig(22, 2, 3) and len(policies) == 1


@pytest.mark.parametrize("tree", [(241, 8, 10), (12, 3, 4), (2, 1, 2)])
def test_the_tree_shows_every_verified_node_once_and_nothing_overlaps(recording, tree):
    snapshot = snapshots.what_if(recording, 0, 0, TreeConfig(*tree))
    panel = panels.tree_panel(snapshot)
    nodes = boxes(panel, "accepted", "verified")
    verified = [node for node, sent in enumerate(snapshot.verified) if sent and node]
    assert sorted(box["data-node"] for box in nodes) == verified
    assert len(nodes) == tree[0] - 1
    accepted = [box["data-node"] for box in boxes(panel, "accepted")]
    assert sorted(accepted) == sorted(snapshot.accepted[1:])
    nodes += boxes(panel, "bonus")
    assert not any(overlap(*two) for two in itertools.combinations(nodes, 2))
    assert max(box["x"] + box["width"] for box in nodes) <= panel.width
    below = panel.height - max(box["y"] + box["height"] for box in nodes)
    assert min(box["y"] for box in nodes) == pytest.approx(below, abs=2), "margins above and below"


@pytest.mark.parametrize("policy", ["ours", "LTD", "RADAR", "fixed 60,7,10"])
def test_words_lie_in_the_panel_on_their_box_and_on_nothing_else(explorer, policy):
    explorer.policy = policy
    for panel in panels.cycle_panels(explorer.lane, 0, explorer.prices).values():
        shapes = [shape for shape in panel.shapes if shape["shape"] != "line"]
        for text in [shape for shape in shapes if shape["shape"] == "text"]:
            left, top, right, bottom = reach(text)
            assert min(left, top) >= 0 and right <= panel.width and bottom <= panel.height, text
            below = [shape for shape in shapes if shape is not text and overlap(text, shape)]
            kinds = [shape.get("data-kind") for shape in below]
            assert kinds == ([text["data-on"]] if "data-on" in text else []), text


def test_page_and_picture_draw_the_same_shapes(recording):
    panel = panels.tree_panel(snapshots.what_if(recording, 0, 0, TreeConfig(24, 4, 4)))
    empty = panels.Panel(10)
    page = ET.fromstring(panels.svg(panel))
    fills = [element.get("fill") for element in page if element.tag.endswith("rect")]
    patches = (
        panels.figure({"text": panel, "time": empty, "tree": empty, "answers": empty})
        .axes[0]
        .patches
    )
    assert len(patches) == len(fills) > 24
    for patch, fill in zip(patches, fills, strict=True):
        levels = [round(255 * part) for part in patch.get_facecolor()[:3]]
        assert fill == "#{:02x}{:02x}{:02x}".format(*levels)


@pytest.mark.parametrize("words", ["<b>&\"'", "\x07\n\t", "日本語", "a" * 40, "$x_1$"])
def test_any_token_can_be_drawn(recording, words):
    snapshot = snapshots.what_if(recording, 0, 0, TreeConfig(6, 2, 4))
    changes = dict(token=(words,) * len(snapshot.token), bonus=words)
    snapshot = snapshots.dataclasses.replace(snapshot, **changes)
    lane = snapshots.Lane("it", [words] * 12, [snapshot])
    drawn = panels.cycle_panels(lane, 0, words)
    for panel in drawn.values():
        ET.fromstring(panels.svg(panel))
    panels.figure(drawn, words).canvas.draw()


def test_stepping_and_another_tree_in_a_cycle(explorer):
    explorer.cycle = 1
    explorer.step(2)
    assert explorer.cycle == 3
    explorer.step(-100)
    assert explorer.cycle == 1
    explorer.cycle = 10**6
    assert explorer.cycle == len(explorer.lane.cycles)
    explorer.policy, explorer.cycle = "ours", 2
    drafted = explorer.lane.cycles[1]
    before = explorer.page["tree"]
    explorer.total_tokens, explorer.depth, explorer.top_k = 12, 4, 2
    tree = TreeConfig(12, 4, 2)
    other = snapshots.what_if(explorer.recording, 0, drafted.position, tree)
    assert explorer.message.startswith(f"What if 12 / 4 / 2: {other.accepted_tok} accepted")
    assert "11 verified" in explorer.page["counts"]
    assert f"in {other.total_ms:.1f} ms" in explorer.page["time"].replace("\u00a0", " ")
    explorer.step(1)
    explorer.step(-1)
    assert explorer.page["tree"] == before
    assert explorer.message == ""
    assert (explorer.total_tokens, explorer.depth, explorer.top_k) == drafted.tree


@pytest.mark.parametrize("policy", ["LTD", "clairvoyant"])
def test_the_text_holds_every_token_once(explorer, policy):
    explorer.turn, explorer.policy, explorer.cycle = 2, policy, 9
    cycle = explorer.lane.cycles[8]
    text = ET.fromstring(explorer.page["text"])
    kinds = [element.get("data-kind") for element in text if element.tag.endswith("text")]
    assert len(kinds) == len(explorer.lane.tokens)
    expected = ["written"] * cycle.position + ["root"] + ["accepted"] * cycle.accepted_tok
    expected.append("bonus")
    assert kinds[: len(expected)] == expected
    assert set(kinds[len(expected) :]) == {"ahead"}
    explorer.turn = 0


def test_the_parts_of_a_cycle_are_a_bar_and_prices_are_named(explorer):
    explorer.policy, explorer.cycle = "ours", 1
    shapes = panels.time_panel(explorer.lane, 0).shapes
    parts = [shape for shape in shapes if shape.get("data-kind") in snapshots.PARTS]
    assert len(parts) == 4
    for left, right in itertools.pairwise(parts):
        assert right["x"] == pytest.approx(left["x"] + left["width"])
    assert explorer.recording.costs.name in explorer.page["time"].replace("\u00a0", " ")
    assert ">predicted value, tokens<" in explorer.page["answers"].replace("\u00a0", " ")


def test_the_picture_has_all_panels_and_a_title(explorer):
    explorer.policy, explorer.cycle = "fixed 60,7,10", 1
    words = [text.get_text() for text in explorer.picture("a title").axes[0].texts]
    assert "a title" in words
    assert "fixed 60,7,10" in words
    assert sum(word.startswith("0.") for word in words) == 59


def test_policies_of_ones_own_come_first_and_misfits_are_said(recording):
    explorer = explore(recording, {"theirs": Static(8, 2, 4)})
    assert explorer.policy == "theirs" and len(explorer.policies) > 4
    deep = explore(recording, {"too deep": Static(60, 20, 10)})
    assert deep.page["message"].startswith("too deep: ")
    assert "tree" not in deep.page
    with pytest.raises(SpecdecError, match="too deep"):
        deep.picture()
    with pytest.raises(SpecdecError, match="policy is one of"):
        explorer.policy = "nobody"
    costs = profile("roofline-a100-llama-8b-eager")
    again = explore(costs=costs)
    assert again.recording.costs is costs and again.recording.prompts == recording.prompts


def test_a_view_waits_for_a_prompt(pair):
    view = specdec.watch(pair, "   ", {}).start()
    assert view.policy == "fixed tree"
    assert "no prompt" in view.page["message"]
    with pytest.raises(SpecdecError, match="no prompt"):
        view.wait()


class Stops(Static):
    """Stops the view that decodes with it in its third cycle."""

    asks = frozenset({"size"})

    def answer(self, question):
        if question.cycle == 2:
            self.live.stop()
        return min(3, question.largest)


class Fails(Policy):
    asks = frozenset({"size"})
    plan = limits = TreeConfig(4, 2, 3)

    def answer(self, question):
        raise ValueError("no idea")


def test_stopping_and_failing_leave_what_was_decoded(pair):
    asked = (pair, "What is 2 + 3?")
    whole = specdec.watch(*asked, Static(4, 2, 3), 40, stop_tokens=()).start().wait()
    assert (whole.finish_reason, whole.new_tok) == ("length", 40)
    policy = Stops(4, 2, 3)
    policy.live = specdec.watch(*asked, policy, 40, stop_tokens=())
    result = policy.live.start().wait()
    assert (result.finish_reason, len(result.cycles)) == ("unfinished", 3)
    assert result.tokens == whole.tokens[: result.new_tok]
    assert result.text == pair.text_of(result.tokens)
    assert policy.live.page["message"].startswith("Stopped: ")
    assert not policy.live.running
    policy.live.step(-1)
    assert policy.live.cycle == 2
    policy.live.step(9)
    assert policy.live.cycle == 3, "the last one"
    # the pair is free again
    assert specdec.decode(pair, "again", max_new_tokens=2).new_tok == 2
    live = specdec.watch(*asked, Fails(), 8)
    assert live.start().wait().new_tok == 1
    assert "no idea" in live.page["message"]
