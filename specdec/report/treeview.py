"""Moved to `explorer_panels`."""

# shim: goes at integration
from specdec.report.explorer_panels import places, printable, readable

__all__ = ["places", "printable", "readable"]
