"""Estimates against measurements: on a terminal, in a browser, as CSV."""
