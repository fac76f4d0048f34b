"""A job: what it is told, and what it writes. The first thing to read."""
