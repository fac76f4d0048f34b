"""The knobs that vary: dimensions, the points they span, and which knobs are active at a point."""
