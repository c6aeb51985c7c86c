"""So that `python -m specdec.book` is `specdec book`: the same commands and options, the same exit statuses (`tools.cli`)."""

import sys

from specdec.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["book", *sys.argv[1:]]))
