"""Phrases to avoid in Markdown, notebooks, docstrings, comments and messages.

`python .ci/words.py` prints each as `file:line: phrase (better)`. Code and `names` are not read.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import links

AVOIDED = {
    r"package registry": "PyPI",
    r"stand(s|ing)? in for|stand-ins?": "replaces, replacement",
    r"lies (in|there|beside|within|where)": "is in, is beside",
    r"can(not)? be had": "is (not) available",
    r"(is|are|was|were|be|been) told": "gets, receives",
    r"nobody (is|else|asks|knows|needs|looks)|somebody|whoever": "no process, the caller",
    r"what is (asked|wanted|meant|there|drafted|read|copied)": "the noun: question, target, drafts",
    r"go(es)? by (prices|the prices)|by the prices": "uses the costs",
    r"go(es)? on|going on|went on": "continues",
    r"for good": "permanently",
    r"at hand": "available",
    r"(if|when|where) need be": "if needed",
    r"c[oa]mes? to nothing": "fails",
    r"for people": "for display",
    r"(on|in) the terms of": "under the same conditions as",
    r"by (the )?rows|rows (say|decide|tell)": "from the measurements",
    r"the rooms|other rooms|rooms? of `?specdec": "folders, modules",
    r"as it were|so to speak|in truth": "leave out",
}
CODE = re.compile(r"`[^`\n]*`|^```.*?^```", re.S | re.M)
WRITTEN_BY_CODE = ("figures/", "specdec/weights/")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of a file's prose; line 1 for Markdown and notebooks."""
    if path.suffix != ".py":
        yield 1, links.prose(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
        return
    middle = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)  # Python 3.12 and newer
    source = io.StringIO(path.read_text(encoding="utf-8"))
    for token in tokenize.generate_tokens(source.readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, middle):
            yield token.start[0], token.string


def avoided(root: Path) -> list[str]:
    """'file:line: phrase (better)' for every phrase to avoid."""
    paths = [*links.files(root), *root.glob("specdec/**/*.py"), *root.glob("notebooks/**/*.py")]
    faults = []
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        for line, text in prose(path) if not name.startswith(WRITTEN_BY_CODE) else ():
            # code is replaced by as many lines
            text = CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
            for phrase, better in AVOIDED.items():
                pattern = rf"\b(?:{phrase})\b".replace(" ", r"\s+")
                for match in re.finditer(pattern, text, re.I):
                    place = line + text.count("\n", 0, match.start())
                    faults.append(f"{name}:{place}: {' '.join(match[0].split())} ({better})")
    return faults


if __name__ == "__main__":
    occurrences = avoided(links.ROOT)
    print("\n".join(occurrences) or "No phrase to avoid.")
    sys.exit(bool(occurrences))
