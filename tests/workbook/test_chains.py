"""Lengths by others as recordings."""

import json

import numpy as np
import pytest

from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.replays.replay import replay

from workbook import chains


def test_lengths_are_read_as_chains(tmp_path):
    for suite in chains.SETS:
        lines = []
        for _ in range(4):
            accepted = {"acc_len": [3, 2, 1, 3, 2, 1, 1, 2]}
            lines.append(json.dumps({"prompt_token_ids": [1, 2], "acc_eagle": accepted}))
        (tmp_path / f"{suite}.jsonl").write_text("\n".join(lines))
    trace = chains.read(chains.find_folder(str(tmp_path)), limit=2)
    assert len(trace.turns) == 2 * len(chains.SETS) and trace.most_nodes == 2
    assert chains.lengths_of(trace)[:8].tolist() == [3, 2, 1, 3, 2, 1, 1, 2]
    # a step of the longest chain begins at positions 0, 3, 6 and 7
    turns = replay(trace, Static(3, 1, 1), chains.h100(1, 2)).table
    assert (turns["cycles"] == 4).all()
    with pytest.raises(SpecdecError):
        chains.read(tmp_path, "ngram")


def test_drafting_level_by_level_costs_more():
    once, per_level = (chains.h100(4, 5, reading) for reading in chains.READINGS)
    assert per_level.draft_ms(1, 4, 0) > once.draft_ms(1, 4, 0)
    assert np.isclose(once.step_ms(0), per_level.step_ms(0))
