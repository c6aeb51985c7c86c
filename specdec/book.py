"""So that `python -m specdec.book` keeps working; the runner of the book is `specdec.tools.book`."""

from specdec.tools.book import main

if __name__ == "__main__":
    raise SystemExit(main())
