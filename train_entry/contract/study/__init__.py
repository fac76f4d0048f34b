"""A study: its records, its goals, and everything that is derived from them."""
