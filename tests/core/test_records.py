"""A Generation before and after decoding, as HTML, and the rates of turns."""

import math
import pickle
from xml.etree import ElementTree

import pandas as pd

from specdec.core.pair import pieces
from specdec.core.records import SUMS, Cycle, Generation, Rates, with_rates

ROW = dict.fromkeys(Cycle.__dataclass_fields__, 1)
ROWS = [
    Cycle(**ROW | dict(accepted_tok=2, new_tok=3, kept_tok=3)),
    Cycle(**ROW | dict(accepted_tok=3, kept_tok=2)),
]


def spaced(tokens):
    """Reads like a SentencePiece tokenizer: é is two tokens, the text's first space is dropped."""
    words = {1: " a", 2: " <b>", 3: "c&", 4: "\ufffd", 5: "é", 6: " d"}
    return "".join(words[token] for token in tokens).replace("\ufffdé", "é").removeprefix(" ")


def test_a_generation_before_anything_is_decoded():
    nothing = Generation([], 3)
    assert nothing.total_ms == 0.0 and math.isnan(nothing.tokens_per_s) and math.isnan(nothing.tau)
    assert list(nothing.cycles.columns) == list(Cycle.__dataclass_fields__)


def test_a_generation_shows_what_was_drafted():
    out = Generation([1, 2, 3, 6, 4, 5], 3, ROWS, prefill_ms=10.0, decode_ms=90.0).read(spaced)
    assert (out.text, out.tau, out.tokens_per_s) == ("a <b>c& dé", 2.0, 60.0)
    marked = [("a", "plain"), (" <b>c&", "accepted"), (" d", "bonus"), ("é", "accepted")]
    page = ElementTree.fromstring(out._repr_html_())
    assert [(span.text, span.get("class")) for span in page.iter("span")] == marked
    copied = pickle.loads(pickle.dumps(out))
    assert copied == out and pieces(copied) == [(out.text, "plain")]


class Turns(Rates):
    table = pd.DataFrame([[10, 4, 12, 50.0, 100.0], [30, 6, 30, 30.0, 90.0]], columns=SUMS)


def test_rates_are_quotients_of_sums():
    rows = with_rates(Turns.table)
    assert rows["tau"].tolist() == [3.0, 5.0] and rows["speedup"].tolist() == [2.0, 3.0]
    assert rows["ms_per_tok"].tolist() == [5.0, 1.0]
    pooled = Turns()
    assert (pooled.tau, pooled.ms_per_tok, pooled.speedup) == (42 / 10, 80 / 40, 190 / 80)
