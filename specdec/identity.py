"""The identity of a comparison's row: which method, under which training conditions.

A `Method` is its name (a str) with the fields it is made of. Tables hold these in the columns
FIELDS; no code of the package parses a name.
"""

from __future__ import annotations

from collections.abc import Iterable

FIELDS = ("system", "terms", "preset", "trained_on", "adapted")
# The vocabulary for a controller's training conditions.
TERMS = {
    "equal": "equal terms",
    "paper": "the paper's settings",
    "official": "the released settings",
    "live": "trained live",
    "shipped": "as shipped",
    "released": "the released weights",
    "tuned": "tuned",
}
EQUAL, PAPER, OFFICIAL, LIVE, SHIPPED, RELEASED, TUNED = TERMS
CARRIED, REPRICED = "carried", "re-priced"
STATIC = "static"
DEFAULT = "default"
PER_SUITE = "per suite"
GRID = "grid"
TREES = {TUNED: "tuned static", PER_SUITE: "per-suite tuned static"}


class Method(str):
    """The name of a method, and the fields it is made of.

    system: a paper's system, a rule, a bound, "static" for a static tree, or any name. terms: its
    training or tuning conditions, a key of TERMS; for a static tree DEFAULT, TUNED, PER_SUITE or
    GRID, the fastest of the trees that a paper's controller chooses between. preset: a static
    tree's numbers, whose GRID, a round of LTD, a file of released weights. trained_on: the costs it
    learned from. adapted: its transfer from there to other costs, CARRIED or REPRICED.
    """

    system: str
    terms: str
    preset: str
    trained_on: str
    adapted: str

    def __new__(cls, system: str, terms="", preset="", trained_on="", adapted=""):
        method = super().__new__(cls, _printed(system, terms, preset, adapted))
        values = (system, terms, preset, trained_on, adapted)
        for name, value in zip(FIELDS, values, strict=True):
            setattr(method, name, value)
        return method

    def __getnewargs__(self):  # of pickle and copy
        return tuple(self.fields.values())

    @classmethod
    def of(cls, name: str) -> Method:
        """`name` if it is a Method, else a method of the caller's with that name."""
        return name if isinstance(name, cls) else cls(name)

    @property
    def fields(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in FIELDS}

    def but(self, **changes: str) -> Method:
        """A copy with some fields changed."""
        return Method(**self.fields | changes)


def _printed(system: str, terms: str, preset: str, adapted: str) -> str:
    """The name of a method for tables and figures."""
    if system == STATIC and terms == DEFAULT:
        return f"{DEFAULT} {preset}"
    if system == STATIC and terms == GRID:
        return f"best static tree of the grid of {preset}"
    if system == STATIC:
        return TREES[terms]
    parts = [system, TERMS[terms] if terms else "", preset, adapted]
    return ", ".join(part for part in parts if part)


def with_fields(table, methods: Iterable[str], **facts):
    """The table with the columns FIELDS of its methods, and with `facts` as constant columns."""
    by_name = {str(name): name for name in methods}
    rows = [Method.of(by_name.get(name, name)) for name in table["method"]]
    columns = {field: [getattr(method, field) for method in rows] for field in FIELDS}
    return table.assign(**columns, **facts)
