"""Makes `python -m specdec.book` the same as `specdec book`; `gpu PART` needs no installation."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["gpu"]:
        from specdec.tools import gpu

        raise SystemExit(gpu.main(sys.argv[2:]))
    from specdec.tools.cli import main

    raise SystemExit(main(["book", *sys.argv[1:]]))
