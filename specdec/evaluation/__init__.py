"""Live measurements and comparisons: the bench, statistics, losslessness, ablations."""
