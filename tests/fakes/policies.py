"""A policy that breaks."""

from specdec.core.policy import Policy
from specdec.core.tree_config import TreeConfig


class Breaks(Policy):
    """Fails at its question number `at`."""

    asks = frozenset({"extend", "size"})
    plan = limits = TreeConfig(8, 2, 3)

    def __init__(self, at: int):
        self.left = at

    def answer(self, question):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("broken")
        return True if question.kind == "extend" else question.largest
