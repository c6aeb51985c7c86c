"""What `data` refuses."""

from refusals import row
from specdec.data import suites

SAME = suites.Prompt("same", "a", ("Hello.",))
ROWS = [
    row("a prompt given twice", lambda given: suites.gather([SAME, SAME]), "'same'", "twice"),
    row("no prompts", lambda given: suites.gather({"mine": []}), "no prompts"),
    row("one text", lambda given: suites.gather({"mine": "Hello."}), "'mine'", "one text"),
    row("no such suite", lambda given: suites.gather("gsm9k"), "gsm8k"),
    row("half a prompt", lambda given: suites.gather("toy/nq", limit=0), "limit"),
]
