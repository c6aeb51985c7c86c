"""Old names of methods, from before they were made of fields: the only place that parses a name.

Rows measured then, such as the published ones, hold the name alone. Knows nothing about what was measured.
"""

from __future__ import annotations

import re

from specdec.identity import (
    DEFAULT,
    EQUAL,
    LIVE,
    OFFICIAL,
    PAPER,
    RELEASED,
    SHIPPED,
    STATIC,
    TREES,
    TUNED,
    Method,
    with_fields,
)

_SYSTEMS = ("Re-SpS", "LTD", "RADAR", "ours")
_PATTERNS = {
    rf"{DEFAULT} ([\d,]+)": lambda tree: Method(STATIC, DEFAULT, tree),
    r"(iter\d+(?:-\w+)?), seed \d+": lambda name: Method("LTD", preset=name),
    r"(\S+) seed \d+": lambda system: Method(system, EQUAL),
    r"(.*), released (\w+)": lambda system, file: Method(system, RELEASED, file),
}
_OTHERWISE = {"GS": Method(f"{TREES[TUNED]} of width 10")}  # which once meant LTD's grid search
_ENDS = {", paper": PAPER, ", official": OFFICIAL, ", live": LIVE, " as shipped": SHIPPED, ", tuned": TUNED}


def identified(table):
    """The table with the columns FIELDS; one without them gets them from its old names."""
    if "method" not in table or "system" in table:
        return table
    names = table["method"]
    old = {name: _old(name) for name in names.unique()}
    table = with_fields(table.assign(method=names.map(lambda name: str(old[name]))), old.values())
    seeds = names.map(_old_seed)
    return table.assign(seed=seeds.fillna(table["seed"]).astype(int)) if seeds.notna().any() else table


def _old(name: str) -> Method:
    """The method of an old-style name, from before names were made of fields.

    >>> _old("RADAR, released llama3").fields
    {'system': 'RADAR', 'terms': 'released', 'preset': 'llama3', 'trained_on': '', 'adapted': ''}
    """
    for terms, tree in TREES.items():
        if name == tree:
            return Method(STATIC, terms)
    if found := re.fullmatch(r"(.*), (carried|re-priced)", name):
        return _old(found[1]).but(adapted=found[2])
    for pattern, made in _PATTERNS.items():
        if found := re.fullmatch(pattern, name):
            return made(*found.groups())
    for end, terms in _ENDS.items():
        if name.endswith(end):
            return Method(name.removesuffix(end), terms)
    return _OTHERWISE.get(name) or Method(name, EQUAL if name in _SYSTEMS else "")


def _old_seed(name: str) -> int | None:
    """The seed in an old-style name."""
    found = re.search(r"seed (\d+)$", name)
    return int(found[1]) if found else None
