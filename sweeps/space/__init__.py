"""The search space: dimensions, the points that they span, and the knobs that are active at a point."""
