"""What `data` refuses."""

from refusals import row
from specdec.data import suites
from specdec.training.drafter.chats import load_conversations
from specdec.training.drafter.generate_data import read_prompts

SAME = suites.Prompt("same", "a", ("Hello.",))

CUT = '{"messages": [{"role": "user", "content": "\\ud83e"}, {"role": "assistant", "content": "Hello."}]}'

ROWS = [
    row("a prompt given twice", lambda given: suites.gather([SAME, SAME]), "'same'", "twice"),
    row(
        "half a character",
        lambda given: load_conversations(given.file("chats.jsonl", CUT)),
        "line 1",
        "half of a",
    ),
    row(
        "half a character, asked",
        lambda given: read_prompts(given.file("asked.jsonl", CUT)),
        "line 1",
        "half of a",
    ),
]
