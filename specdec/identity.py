"""The identity of a comparison's row as data: which method, under which training conditions. Names
are printed from it.

    Method("LTD", terms="equal")                     LTD, equal terms
    Method("static", terms="default", preset="60,7,10")   default 60,7,10

A `Method` is its name (a str) with the fields it is made of. Tables hold these in the columns
FIELDS, with seed, temperature and machine; no code of the package parses a name. Knows nothing
about policies, and imports no model.
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
STATIC, DEFAULT, PER_SUITE, GRID = "static", "default", "per suite", "grid"
TREES = {TUNED: "tuned static", PER_SUITE: "per-suite tuned static"}


class Method(str):
    """The name of a method, and the fields it is made of.

    system: what decides: a paper's system, a rule, a bound, "static" for a static tree, or any name
    of the caller's.
    terms: its training or tuning conditions, a key of TERMS; for a static tree DEFAULT, TUNED,
    PER_SUITE or GRID, the fastest of the trees that a paper's controller chooses between.
    preset: which of several: a static tree's numbers, whose GRID, a round of LTD, a file of
    released weights.
    trained_on: the costs it learned from. adapted: its transfer from there to other costs: CARRIED
    unchanged, REPRICED.

    >>> Method("RADAR", terms="paper"), Method("DDD", terms="tuned"), Method("mine").system
    ('RADAR, the paper's settings', 'DDD, tuned', 'mine')
    """

    system: str
    terms: str
    preset: str
    trained_on: str
    adapted: str

    def __new__(
        cls, system: str, terms: str = "", preset: str = "", trained_on: str = "", adapted: str = ""
    ):
        method = super().__new__(cls, _printed(system, terms, preset, adapted))
        method.__dict__.update(
            system=system, terms=terms, preset=preset, trained_on=trained_on, adapted=adapted
        )
        return method

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

    def __reduce__(self):
        return Method, tuple(self.fields.values())


def _printed(system: str, terms: str, preset: str, adapted: str) -> str:
    if system == STATIC:
        named = {DEFAULT: f"{DEFAULT} {preset}", GRID: f"best static tree of the grid of {preset}"}
        return named.get(terms) or TREES[terms]
    return ", ".join(filter(None, [system, TERMS[terms] if terms else "", preset, adapted]))


def with_fields(table, methods: Iterable[str], **facts):
    """The table with the columns FIELDS, each row's from its method among `methods`, and with
    `facts` as constant columns.
    """
    known = {str(name): name for name in methods}
    rows = [Method.of(known.get(name, name)) for name in table["method"]]
    columns = {field: [getattr(method, field) for method in rows] for field in FIELDS}
    return table.assign(**columns, **facts)
