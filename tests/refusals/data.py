"""What `data` refuses."""

from refusals import row
from specdec.data import suites
from specdec.training.drafter.chats import load_conversations
from specdec.training.drafter.generate_data import read_prompts

SAME = suites.Prompt("same", "a", ("Hello.",))
USER = '{"role": "user", "content": "\\ud83e"}'
CUT = f'{{"messages": [{USER}, {{"role": "assistant", "content": "Hello."}}]}}'


def chats(read):
    return lambda given: read(given.file("chats.jsonl", CUT))


ROWS = [
    row("a prompt given twice", lambda given: suites.gather([SAME, SAME]), "'same'", "twice"),
    row("no prompts", lambda given: suites.gather({"mine": []}), "no prompts"),
    row("no such suite", lambda given: suites.gather("gsm9k"), "gsm8k"),
    row("half a prompt", lambda given: suites.gather("toy/nq", limit=0), "limit"),
    row("half a character", chats(load_conversations), "line 1", "half of a"),
    row("half a character to answer", chats(read_prompts), "line 1", "half of a"),
]
