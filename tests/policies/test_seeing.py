"""What published systems may see beside their own observation: the same in training and decoding, nothing if unsaid."""

import numpy as np
import pytest
from fakes.pairs import shared_bigrams
from fakes.questions import Watch
from fakes.traces import COSTS

from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.models.fingerprint import fingerprint
from specdec.policies import ltd, radar, resps
from specdec.policies.base import repetitions
from specdec.replays.record import record
from specdec.replays.replay import replay
from specdec.training.loop import TrainingRun
from specdec.training.radar import from_trace

TREE = dict(total_tokens=12, top_k=3)
MAKERS = {
    "Re-SpS": (lambda **more: resps.RespsPolicy(state="official", hidden_size=4, **more), 1),
    "depth": (lambda **more: ltd.DepthPolicy(depth=7, **TREE, **more), ltd.DEPTH_COPIES),
    "size": (lambda **more: ltd.SizePolicy(sizes=(4, 8), depth=7, drafted=7, top_k=3, **more), ltd.SIZE_COPIES),
    "RADAR": (lambda **more: radar.RadarPolicy(**TREE, **more), 1),
}


@pytest.mark.parametrize("system", MAKERS)
def test_the_repetitions_stand_behind_what_was_published(system):
    small = dict(depth=7, top_ks=(3,), trees=(3,), max_new_tokens=30, progress=False)
    trace = record(shared_bigrams(), [[5, 1, 2, 3, 9, 5, 1, 2]], **small)
    make, copies = MAKERS[system]
    plain, seeing, asking, seen = make(), make(sees=("copies",)), Static(**TREE, depth=7), []

    def look(question):
        told = plain.observation(question), seeing.observation(question), np.repeat(repetitions(question), copies)
        seen.append((question.view.row, question.expansions, *map(np.array, told)))

    answers = {"plan": asking.plan, "extend": True, "size": 4}
    asking.asks, asking.answer = plain.asks, lambda question: answers[question.kind]
    replay(trace, Watch(asking, look), COSTS)
    data = from_trace(trace, exact=False, tree=radar.RadarConfig(**TREE).tree, sees=("copies",))
    trained = make(sees=("copies",)).fill_at_random((8, 8)) if system == "size" else None
    for row, level, own, more, told in seen:
        np.testing.assert_array_equal(more, np.concatenate((own, told)))
        if system == "RADAR":
            np.testing.assert_allclose(data.scores[row, level], more, rtol=1e-6)
        if trained is not None:  # it leaves most multiplications out
            np.testing.assert_allclose(trained.logits(more), trained.network(more), rtol=1e-4, atol=1e-5)
    assert len(more) == seeing.observation_size and len({row for row, *_ in seen}) > 3
    matched, probability = np.abs([told for *_, told in seen]).max(0)[[0, -1]]
    assert matched and bool(probability) == (system != "Re-SpS"), "it is asked before anything is drafted"
    assert "sees" not in fingerprint(plain) and "sees" in fingerprint(seeing)
    pytest.raises(SpecdecError, make, sees=("surprise",)).match("what a system sees")


def test_a_run_from_before_is_found_again(tmp_path):
    before = {"steps": 3, "learner": ["RespsPolicy", {"interval": 3}], "config": {"name": "ours"}}
    TrainingRun(tmp_path, before)
    now = {**before, "learner": ["RespsPolicy", {"interval": 3, "sees": []}], "config": {"name": "ours", "sees": ()}}
    assert TrainingRun(tmp_path, now).plan["settings"] == before
    other = {**now, "config": {"name": "ours", "sees": ("copies",)}}
    pytest.raises(SpecdecError, TrainingRun, tmp_path, other).match("other settings")
