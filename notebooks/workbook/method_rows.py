"""Rows of methods: every table of them has the columns of `specdec.identity.FIELDS`."""

from specdec.identity import with_fields


def identified(table):
    """The table with the columns FIELDS; without them each method is a system of its own."""
    if "method" not in table or "system" in table:
        return table
    return with_fields(table, table["method"].unique())
