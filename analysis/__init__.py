"""Reads study directories, and nothing else: what was tried, what was seen, what is best."""
