"""Makes `python -m specdec.book` the same as `specdec book`."""

import sys

from specdec.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["book", *sys.argv[1:]]))
