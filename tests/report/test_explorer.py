"""The explorer without a browser: what it draws, what the controls do, what it says about bad
input.
"""

import dataclasses
import itertools
import re
import shutil
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import specdec
from specdec import runs
from specdec.core.policy import Policy, Static
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.replays import snapshots
from specdec.report import explorer_panels as panels
from specdec.report.explorer import FOLDER, explore
from specdec.report.live import Live

SHIPPED = FOLDER / "recordings" / "smollm2"


@pytest.fixture(scope="module")
def recording():
    return snapshots.open_recording(SHIPPED)


@pytest.fixture(scope="module")
def explorer(recording):
    opened = explore(recording)
    assert opened.policy.value == "ours", "what it begins with"
    return opened


@pytest.fixture(scope="module")
def pair():
    return specdec.load_pair("tiny", dtype="float32")


def boxes(panel, *kinds):
    return [
        shape for shape in panel.shapes if shape["shape"] == "rect" and shape.get("kind") in kinds
    ]


def test_what_is_shown_is_small_whole_and_said_alike(recording):
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 10e6
    assert len(recording.titles) == 6 and recording.top_ks == [2, 4, 10]
    assert all("#" not in recording.tokens(turn)[0] for turn in range(6))
    known = {
        int(token)
        for top_k in recording.top_ks
        for token in recording.trace.trees(top_k).tokens[:40].ravel()
    }
    assert known <= set(recording.texts)
    assert panels.counted(1, "node") == "1 node" and snapshots._in_words("size", 1) == "1 node"
    lone = snapshots.what_if(recording, 0, 0, TreeConfig(2, 1, 2))
    assert "root + 1 of " in panels.tree_words(lone) and "1 nodes" not in panels.svg(
        panels.answers_panel("it", lone)
    )
    rule = snapshots.Asked("size", 2, "5 nodes", unit="")
    asked = panels.answers_panel("it", dataclasses.replace(lone, asked=(rule,)))
    assert not any("network" in str(shape.get("words")) for shape in asked.shapes)


def test_the_tree_shows_every_verified_node_once_and_folds(recording):
    for tree in (TreeConfig(241, 8, 10), TreeConfig(12, 3, 4), TreeConfig(1, 0, 2)):
        one = snapshots.what_if(recording, 0, 0, tree)
        panel = panels.tree_panel(one)
        drawn = boxes(panel, "root", "accepted", "verified")
        assert {shape["node"] for shape in drawn} == {
            node for node, sent in enumerate(one.verified) if sent
        }
        assert len(drawn) == sum(one.verified) == tree.total_tokens
        accepted = [shape["node"] for shape in boxes(panel, "accepted")]
        assert sorted(accepted) == sorted(one.accepted[1:])
        assert all(shape["fill"] == panels.ACCEPTED for shape in boxes(panel, "accepted"))
        assert len(boxes(panel, "bonus")) == 1
        everything = panels.tree_panel(one, cut=True)
        assert len(boxes(everything, "cut")) == len(one.token) - sum(one.verified)
    one = snapshots.what_if(recording, 0, 0, TreeConfig(60, 7, 10))
    folded = panels.tree_panel(one, panels.foldable(one))
    counted = sum(
        int(re.search(r"▸ (\d+)", s["words"])[1])
        for s in folded.shapes
        if "▸" in str(s.get("words"))
    )
    drawn = boxes(folded, "root", "accepted", "verified")
    assert len(drawn) + counted == 60 and counted > 10
    assert [shape["node"] for shape in boxes(folded, "accepted")] == list(one.accepted[1:])


def test_nothing_overlaps_in_a_tree_of_240_nodes_and_words_fit_into_their_boxes(recording):
    panel = panels.tree_panel(snapshots.what_if(recording, 0, 0, TreeConfig(241, 8, 10)))
    nodes = boxes(panel, "root", "accepted", "verified", "bonus")
    assert len(nodes) == 242
    for one, other in itertools.combinations(nodes, 2):
        apart = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
        assert (
            apart
            or one["y"] + one["height"] <= other["y"]
            or other["y"] + other["height"] <= one["y"]
        )
    texts = [shape for shape in panel.shapes if shape["shape"] == "text" and shape["words"]]
    assert min(shape["size"] for shape in texts) >= 8
    assert all(0 <= box["x"] and box["x"] + box["width"] <= panel.width for box in nodes)
    assert all(box["y"] + box["height"] <= panel.height for box in nodes)
    panel = panels.tree_panel(snapshots.what_if(recording, 1, 5, TreeConfig(60, 5, 10)))
    for box, words in zip(panel.shapes, panel.shapes[1:], strict=False):
        if box["shape"] == "rect" and box.get("node") is not None:
            assert words["x"] + panels.wide(words["words"]) <= box["x"] + box["width"]


def test_a_redraw_of_240_nodes_takes_less_than_100_ms(explorer):
    explorer.policy.value = "fixed 60,7,10"
    explorer.depth.value, explorer.top_k.value, explorer.total_tokens.value = 8, 10, 240
    spent_ms = []
    for total_tokens in (
        241,
        239,
        241,
        239,
        241,
    ):  # the best of some: other processes on the machine take caches away
        begin = time.process_time()
        explorer.total_tokens.value = total_tokens
        spent_ms.append(1e3 * (time.process_time() - begin))
        assert explorer.view.page["lanes"][0]["facts"]["verified"] == total_tokens - 1
    assert min(spent_ms) < 100, f"{spent_ms} ms of processor time"
    explorer.own.click()


def test_figure_and_page_draw_the_same_shapes_in_colours_that_survive_greyscale(recording):
    panel = panels.tree_panel(snapshots.what_if(recording, 0, 0, TreeConfig(24, 4, 4)))
    page = ET.fromstring(panels.svg(panel))
    figure = panels.figure([panel])
    rects = [element for element in page.iter() if element.tag.endswith("rect")]
    assert len(rects) == len(figure.axes[0].patches)
    shades = [
        [round(255 * c) for c in patch.get_facecolor()[:3]] for patch in figure.axes[0].patches
    ]
    assert [r.get("fill") for r in rects] == [
        "#{:02x}{:02x}{:02x}".format(*shade) for shade in shades
    ]

    def grey(colour):
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    kinds = ("root", "accepted", "bonus", "verified")
    fills = sorted(grey(panels.NODE_LOOKS[kind][0]) for kind in kinds)
    parts = sorted(grey(shade) for shade in panels.SHADES.values())
    for lightness in (fills, parts):
        assert min(b - a for a, b in itertools.pairwise(lightness)) > 30
    for fill, _, ink, _, _ in panels.NODE_LOOKS.values():
        assert abs(grey(fill) - grey(ink)) > 90


@pytest.mark.parametrize("words", ["<b>&\"'", "\x07\n\t", "日本語", "a" * 40, "$x_1$"])
def test_any_token_can_be_drawn(recording, words):
    one = snapshots.what_if(recording, 0, 0, TreeConfig(6, 2, 4))
    one = dataclasses.replace(one, token=(words,) * len(one.token), bonus=words, refused=words)
    lane = snapshots.Lane("it", [words] * 12, [one])
    drawn = [panels.text_panel([(lane, 0)], 500), panels.tree_panel(one)]
    drawn += [panels.answers_panel(words, one), panels.time_panel([(lane, 0)])]
    for panel in drawn:
        ET.fromstring(panels.svg(panel))
    figure = panels.figure(drawn, words)
    figure.canvas.draw()


def test_stepping_playing_jumping_and_sliders(explorer):
    explorer.cycle.value = 1
    assert explorer.shown[0][1] == 0
    explorer.forth.click()
    explorer._received(None, {"do": "step", "by": 1})
    assert explorer.shown[0][1] == 2
    explorer._received(None, {"do": "step", "by": -100})
    assert explorer.shown[0][1] == 0
    explorer._received(None, {"do": "go", "cycle": 1e6})
    assert explorer.shown[0][1] == len(explorer.shown[0][0].cycles) - 1
    explorer._received(None, {"do": "play"})
    assert explorer.play.value
    explorer._received(None, {"do": "play"})
    explorer.back.click()
    assert explorer.shown[0][1] == len(explorer.shown[0][0].cycles) - 2
    explorer.cycle.value = 2
    explorer.policy.value = "ours"
    before = explorer.view.page["lanes"][0]["tree"]
    explorer.total_tokens.value, explorer.depth.value, explorer.top_k.value = 12, 4, 2
    lane, number = explorer.shown[0]
    position, turn = lane.cycles[number].position, explorer.turn.value
    other = snapshots.what_if(explorer.recording, turn, position, TreeConfig(12, 4, 2))
    assert explorer.message.startswith(
        f"What if 12 / 4 / 2: {other.accepted_tok} accepted in place of"
    )
    assert explorer.view.page["lanes"][0]["facts"]["verified"] == 11
    assert explorer.view.page["lanes"][0]["tree"] != before
    assert f"in {other.total_ms:.1f} ms" in explorer.view.page["time"].replace("\u00a0", " ")
    explorer.own.click()
    assert explorer.view.page["lanes"][0]["tree"] == before and explorer.message == ""
    assert (explorer.total_tokens.value, explorer.depth.value, explorer.top_k.value) == lane.cycles[
        number
    ].tree


def test_two_policies_and_the_clairvoyant_stand_at_one_place_of_the_text(explorer):
    explorer.turn.value = 2
    explorer.policy.value, explorer.other.value, explorer.bound.value = "LTD", "RADAR", True
    explorer.cycle.value = 9
    assert [lane.name for lane, _ in explorer.shown] == ["LTD", "RADAR", "clairvoyant"]
    position = explorer.shown[0][0].cycles[8].position
    for lane, number in explorer.shown:
        one = lane.cycles[number]
        assert one.position <= position < one.position + one.kept_tok
    assert len(explorer.view.page["lanes"]) == 3 and "clairvoyant" in explorer.view.page["time"]
    text = ET.fromstring(
        explorer.view.page["text"]
    )  # one for all of them, with a mark of each below a token
    words = [one for one in text.iter() if one.tag.endswith("text")]
    assert len(words) == len(explorer.shown[0][0].tokens)
    tips = {one.get("data-tip") for one in text.iter() if one.get("data-kind") == "accepted"}
    assert tips == {
        f"{lane.name}: accepted"
        for lane, number in explorer.shown
        if lane.cycles[number].accepted_tok
    }
    explorer.other.value, explorer.bound.value, explorer.turn.value = "no policy", False, 0
    assert len(explorer.view.page["lanes"]) == 1


def test_drawings_say_what_they_show_and_whose_prices(explorer):
    explorer.policy.value, explorer.cycle.value = "ours", 1
    lane, number = explorer.shown[0]
    page, one = explorer.view.page, lane.cycles[number]
    parts = page["text"], page["time"], page["lanes"][0]["tree"], page["lanes"][0]["answers"]
    text, time_, tree, answers = (ET.fromstring(part).get("aria-label") for part in parts)
    path = " ".join(repr(one.token[node]) for node in one.accepted[1:])
    assert (
        f"accepted {path}" in text
        and f"accepted {path}, then the bonus token {one.bonus!r}" in tree
    )
    assert f"root + {one.tree[0] - 1} of {len(one.token) - 1} nodes, depth {one.tree[1]} " in tree
    assert f"cycle 1/{len(lane.cycles)}" in time_ and "extend after call 1: " in answers
    assert (
        explorer.recording.costs.name in time_ and explorer.recording.costs.machine["cpu"] in time_
    )
    spent = [
        shape
        for shape in panels.time_panel([(lane, number)]).shapes
        if shape.get("kind") in snapshots.PARTS
    ]
    assert (
        all(b["x"] == pytest.approx(a["x"] + a["width"]) for a, b in itertools.pairwise(spent))
        and len(spent) > 3
    )
    controls = {one["name"]: one for one in page["controls"]}
    assert (
        all(one["tip"] for one in controls.values())
        and controls["depth"]["value"] == explorer.depth.value
    )
    options = controls["policy"]["options"]
    explorer._received(None, {"do": "set", "name": "policy", "value": options.index("LTD")})
    assert explorer.policy.value == "LTD"
    explorer._received(None, {"do": "set", "name": "cycle", "value": "no number"})
    assert explorer.cycle.value == 1
    explorer.policy.value = "ours"


def test_folding_from_the_page_and_the_picture_of_what_is_shown(explorer, tmp_path):
    explorer.policy.value = "fixed 60,7,10"
    explorer.cycle.value = 1
    whole = explorer.view.page["lanes"][0]["tree"]
    explorer._received(None, {"do": "fold"})
    folded = explorer.view.page["lanes"][0]["tree"]
    assert "▸" in folded and len(folded) < len(whole)
    explorer._received(None, {"do": "fold"})
    assert explorer.view.page["lanes"][0]["tree"] == whole

    figure = explorer.picture("a title", folded=True)
    words = [text.get_text() for text in figure.axes[0].texts]
    assert "a title" in words and explorer.shown[0][0].name in words
    figure.savefig(tmp_path / "it.svg")
    assert (tmp_path / "it.svg").stat().st_size > 10_000

    assert "application/vnd.jupyter.widget-view+json" in str(explorer._repr_mimebundle_())


def test_what_cannot_be_opened_explored_or_watched_is_said(recording, tmp_path, pair):
    header = {**recording.trace.header, "schema": 99}
    runs.write_json(tmp_path / "trace.json", header)
    broken = explore(tmp_path)
    assert f"{tmp_path / 'trace.json'} was written with schema 99" in broken.view.page["message"]
    pytest.raises(SpecdecError, broken.picture).match("schema 99")
    assert explore(tmp_path / "nowhere").message
    foreign = specdec.load_policy("small/ours-float32")
    shown = explore(recording, {"theirs": foreign})
    assert next(iter(shown.policies)) == shown.policy.value == "theirs" and len(shown.policies) > 1
    assert "small" in shown.view.page["message"] and "smollm2" in shown.view.page["message"]
    deep = explore(recording, {"too deep": specdec.Static(60, 20, 10)})
    assert deep.view.page["message"].startswith("too deep: ") and deep.view.page["lanes"] == []
    unfit = (
        [(3,), ([],), ([3],), (b"x",)],
        [(None, 3), (None, {})],
        [(None, {"a": 3}), (None, {1: Static(4, 1, 2)})],
    )
    for some, name in zip(unfit, ("recording", "policies", "policy"), strict=True):
        for arguments in some:
            pytest.raises(SpecdecError, explore, *arguments).match(name)
    unfit = [("pair", 3, "pair"), ("policies", {}, "policies"), ("policies", {"a": 3}, "policy")]
    for option, value, name in (
        *unfit,
        *(("max_new_tokens", most, "max_new_tokens") for most in (-1, "x")),
    ):
        pytest.raises(
            SpecdecError, specdec.watch, **{"pair": pair, "prompt": [1, 2], option: value}
        ).match(name)


def test_watching_begins_with_a_sentence_and_one_start_and_stop(pair):
    page = specdec.watch(pair, "What is 2 + 3?").view.page
    assert page["message"].startswith("Press start")
    begins = [
        one["name"] for one in page["controls"] if "st" in one["name"] or one["kind"] == "Play"
    ]
    assert begins == ["most", "start_button", "stop_button"]
    assert "prompt" in specdec.watch(pair, 3).start().message
    assert specdec.watch(pair, [1, 2], max_new_tokens=10**6).most.value == 10**6

    for prompt in ("", "   "):
        live = Live(pair, prompt, {"it": None}, 8, {}).start()
        assert live.view.page["message"] == "there is no prompt; write a question and start again."
        pytest.raises(SpecdecError, live.wait).match("no prompt")


class Slow(specdec.Static):
    """Stops the view that decodes with it in its third cycle."""

    asks = frozenset({"size"})

    def answer(self, question):
        if question.cycle == 2:
            self.live.stop()
        return min(3, question.largest)


def test_stopping_and_failing_leave_what_was_decoded(pair):
    whole = (
        specdec.watch(pair, "What is 2 + 3?", specdec.Static(4, 2, 3), 40, stop_tokens=())
        .start()
        .wait()
    )
    assert whole.finish_reason == "length" and whole.new_tok == 40
    policy = Slow(4, 2, 3)
    policy.live = specdec.watch(pair, "What is 2 + 3?", policy, 40, stop_tokens=())
    result = policy.live.start().wait()
    assert result.finish_reason == "unfinished" and len(result.cycles) == 3
    assert result.tokens == whole.tokens[: result.new_tok] and result.text == pair.text_of(
        result.tokens
    )
    assert policy.live.view.page["message"].startswith("Stopped: ")
    assert not policy.live.running and policy.live.stop_button.disabled
    policy.live.step(-1)
    assert policy.live.shown[0][1] == 1
    assert specdec.decode(pair, "again", max_new_tokens=2).new_tok == 2  # the pair is free again
    live = specdec.watch(pair, "What is 2 + 3?", Fails(), 8)
    assert live.start().wait().new_tok == 1
    assert (
        "no idea" in live.view.page["message"]
        and "Until then: 1 tokens" in live.view.page["message"]
    )


class Fails(Policy):
    asks = frozenset({"size"})
    plan = limits = TreeConfig(4, 2, 3)

    def answer(self, question):
        raise ValueError("no idea")


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{}", '{"schema": 1, "texts": {"x": "y"}, "prompts": []}']
)
def test_a_changed_recording_is_said(tmp_path, text):
    for name in ("texts.json",) if text else ("texts.json", "turns.parquet"):
        folder = Path(shutil.copytree(SHIPPED, tmp_path / name))
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(text.encode() or bytes(content))
        assert name in explore(folder).message
