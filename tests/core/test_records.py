"""What is noted of decoding, before anything was decoded, and the names that files and tables go
by.
"""

import copy
import math
import pickle
import re
from xml.etree import ElementTree

import pandas as pd

from specdec.core import records, shown
from specdec.core.records import SUMS, Cycle, Generation, Rates, with_rates


def test_a_generation_shows_what_was_drafted():
    nothing = Generation([], 3)
    assert (nothing.rows, nothing.text, nothing.finish_reason) == ([], None, "length")
    assert nothing.prefill_ms == nothing.decode_ms == nothing.total_ms == 0.0
    assert math.isnan(nothing.tokens_per_s) and math.isnan(nothing.tau)
    assert list(nothing.cycles.columns) == list(Cycle.__dataclass_fields__)
    assert len(nothing.cycles) == 0
    row = dict.fromkeys(Cycle.__dataclass_fields__, 1)
    rows = [
        Cycle(**row | dict(accepted_tok=2, new_tok=3, kept_tok=3)),
        Cycle(**row | dict(accepted_tok=3, kept_tok=2)),
    ]
    out = Generation([1, 2, 3, 6, 4, 5], 3, rows, prefill_ms=10.0, decode_ms=90.0).read(spaced)
    assert out.text == "a <b>c& dé"
    said = [("a", "plain"), (" <b>c&", "accepted"), (" d", "bonus"), ("é", "accepted")]
    assert shown.pieces(out) == said
    page = ElementTree.fromstring(out._repr_html_())
    spans = [(one.text, one.get("class")) for one in page.iter("span") if one.get("class")]
    assert spans == said and "<b>" not in out._repr_html_()  # escaped
    words = "".join(page.itertext())
    assert "6 tokens, 4 of them drafted" in words
    assert "tau 2.00" in words
    assert "60.0 tokens/s" in words
    bar = next(one for one in page.iter() if one.get("role") == "img")
    widths = [float(re.search(r"width: ([\d.]+)%", one.get("style"))[1]) for one in bar]
    assert "prefill 10 ms, draft 2 ms" in bar.get("aria-label") and abs(sum(widths) - 100) < 0.1
    assert repr(out) == "Generation('a <b>c& dé', 6 tokens, 2 cycles, tau 2.00, 60 tokens/s)"
    assert "color:" not in re.sub("background-color", "", out._repr_html_())  # the page's own ink
    for copied in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out)):
        assert copied == out
        assert copied.read_text is None
        assert shown.pieces(copied) == [(out.text, "plain")]
    none = Generation([5], 3)
    assert repr(none) == "Generation(1 tokens)" and "ids [5]" in none._repr_html_()


MARKS = "▁"  # a metaspace: the tokenizer drops the first one of a text


def spaced(tokens):
    """Reads like a SentencePiece tokenizer: é is two tokens."""
    words = {1: "▁a", 2: "▁<b>", 3: "c&", 4: "\ufffd", 5: "é", 6: "▁d"}
    text = "".join(words[token] for token in tokens).replace("\ufffdé", "é")
    return text.replace(MARKS, " ").removeprefix(" ")


def test_names_that_stored_files_go_by_and_rates_of_rows():
    assert (records.PLAN, records.EXTEND, records.SIZE) == ("plan", "extend", "size")
    assert records.TURN == ["suite", "prompt", "turn"]
    assert records.SUMS == ["new_tok", "cycles", "cycle_tok", "time_ms", "plain_ms"]
    rows = with_rates(TABLE)
    assert rows["tau"].tolist() == [3.0, 5.0] and rows["speedup"].tolist() == [2.0, 3.0]
    assert rows["ms_per_tok"].tolist() == [5.0, 1.0]
    together = with_rates(TABLE.sum().to_frame().T).iloc[0]
    pooled = Turns()
    assert (pooled.tau, pooled.ms_per_tok, pooled.speedup) == (42 / 10, 80 / 40, 190 / 80)
    assert (pooled.tau, pooled.ms_per_tok, pooled.speedup) == tuple(
        together[["tau", "ms_per_tok", "speedup"]]
    )


TABLE = pd.DataFrame([[10, 4, 12, 50.0, 100.0], [30, 6, 30, 30.0, 90.0]], columns=SUMS)


class Turns(Rates):
    table = TABLE
