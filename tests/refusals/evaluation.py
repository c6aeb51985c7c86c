"""What `evaluation` refuses."""

from refusals import row
from specdec.core.decode import decode
from specdec.evaluation.lossless import audit
from specdec.evaluation.tuning import tune_static

ROWS = [
    row("setting", lambda given: decode(given.pair, "Hi", topk=3), "'topk'", "'top_k'"),
    row("one text", lambda given: audit(given.pair, "Hello."), "prompts must be list", "'Hello.'"),
    row("no tree", lambda given: tune_static(given.pair, [[1]], [(3, 1, 1)]), "(3, 1, 1)", "tree"),
]
