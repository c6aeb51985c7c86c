"""Rows of methods: every table of them has the columns of `specdec.identity.FIELDS`."""

from specdec.identity import with_fields
from specdec.replays.trace import SHARED_NOISE

# of rows from sampled recordings that do not name their noise
SHARED = f"Sampled with noise {SHARED_NOISE}"


def identified(table):
    """The table with the columns FIELDS; without them each method is a system of its own."""
    if "method" not in table or "system" in table:
        return table
    return with_fields(table, table["method"].unique())


def mark_of_noise(table) -> str:
    """SHARED if some rows were replayed from sampled recordings that drew one noise, else "".

    Recordings and tables name the noise of sampled text since it is each prompt's own.
    """
    facts = table.reindex(columns=["temperature", "machine", "noise", "tok_per_s", "clock"])
    sampled = facts["temperature"].fillna(0).astype(float) > 0
    # rows decoded live have a speed or a clock
    replayed = facts["machine"].notna() & facts[["tok_per_s", "clock"]].isna().all(axis=1)
    shared = facts["noise"].fillna(SHARED_NOISE) == SHARED_NOISE
    return SHARED if (sampled & replayed & shared).any() else ""
