"""What `data` refuses."""

from refusals import row
from specdec.data import suites

SAME = suites.Prompt("same", "a", ("Hello.",))

ROWS = [row("a prompt given twice", lambda given: suites.gather([SAME, SAME]), "'same'", "twice")]
