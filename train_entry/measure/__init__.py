"""Measurements of a running trial: step times, memory, the health of the card."""
