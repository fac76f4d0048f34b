"""The model that is trained: its shape, its weights, and how degrees divide it."""
