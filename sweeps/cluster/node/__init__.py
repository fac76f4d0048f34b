"""The code that runs on every node, whatever launched it: it starts a rank, watches it and cleans up."""
