"""A study's records and goals, and the values derived from them."""
