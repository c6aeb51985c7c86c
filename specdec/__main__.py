"""Makes `python -m specdec` run the command `specdec`."""

from specdec.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
