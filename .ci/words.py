"""Words and phrases to avoid, with better ones: in Markdown, notebooks, and the docstrings, comments and messages of code.

`python .ci/words.py` lists every occurrence as `file:line: phrase (better)`. Code and quoted names (`...`) are not read.
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
    r"stands? (in(?! for)|there|beside|behind|below|above)|as (it|they) stands?": "is, is in, unchanged",
    r"lies (in|there|beside|within|where)": "is in, is beside",
    r"can(not)? be had": "is (not) available, cannot be downloaded",
    r"(is|are|was|were|be|been) told": "gets, receives, is recognised by",
    r"nobody (is|else|asks?|asked|pays|takes|knows|needs|looks|says)|somebody|whoever": "no process, the caller",
    r"who (is|knows|reads|looks|has|keeps|sets|owns|asks|decides)": "name the function, user or process",
    r"(what|which) is (fresh|stale)": "is up to date, out of date",
    r"what is (asked|wanted|meant|there|drafted|read|copied)": "use the noun: question, target, drafts",
    r"what costs what": "costs",
    r"go(es)? by (prices|the prices)|by the prices": "uses the costs, with the costs",
    r"go(es)? on|going on|went on": "continues",
    r"for good": "permanently",
    r"at hand": "available",
    r"(if|when|where) need be": "if needed",
    r"one's own|other people's": "your own, other",
    r"c[oa]mes? to nothing": "fails",
    r"for people": "for display",
    r"(on|in) the terms of": "under the same conditions as",
    r"by (the )?rows|rows (say|decide|tell)": "from the measurements, the measurements show",
    r"bears? (it|that|this|them) out": "confirms",
    r"the rooms|other rooms|rooms? of `?specdec": "folders, modules",
    r"as it were|so to speak|in truth": "leave out",
}
PHRASES = {
    re.compile(rf"\b(?:{phrase})\b".replace(" ", r"\s+"), re.I): better
    for phrase, better in AVOIDED.items()
}
SKIPPED = ("figures/", "specdec/weights/")  # written by code
CODE = re.compile(r"`[^`\n]*`|^```.*?^```", re.S | re.M)


def blank(match: re.Match) -> str:
    """Code replaced by as many lines."""
    return "\n" * match[0].count("\n")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of a file's prose; line 0 for a notebook."""
    if path.suffix == ".md":
        yield 1, CODE.sub(blank, path.read_text(encoding="utf-8"))
    elif path.suffix == ".ipynb":
        yield 0, CODE.sub(blank, links.prose(path))
    else:
        middle = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)  # Python 3.12 and newer
        for token in tokenize.generate_tokens(
            io.StringIO(path.read_text(encoding="utf-8")).readline
        ):
            if token.type in (tokenize.COMMENT, tokenize.STRING, middle):
                yield token.start[0], CODE.sub(blank, token.string)


def avoided(root: Path) -> list[str]:
    """'file:line: phrase (better)' for every phrase to avoid."""
    files = [
        path for path in links.files(root) if not str(path.relative_to(root)).startswith(SKIPPED)
    ]
    found = []
    for path in [
        *files,
        *sorted(
            path for folder in ("specdec", "notebooks") for path in (root / folder).rglob("*.py")
        ),
    ]:
        for line, text in prose(path):
            for phrase, better in PHRASES.items():
                for match in phrase.finditer(text):
                    at = line + text.count("\n", 0, match.start()) if line else "Markdown"
                    found.append(
                        f"{path.relative_to(root)}:{at}: {' '.join(match[0].split())} ({better})"
                    )
    return found


if __name__ == "__main__":
    occurrences = avoided(Path(__file__).resolve().parents[1])
    print("\n".join(occurrences) or "No phrase to avoid.")
    sys.exit(bool(occurrences))
