"""Times of a cycle: the cost model, published machines, and measurements of this machine."""
