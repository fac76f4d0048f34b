"""Turn a point of the space into a plan, or into every reason why it is illegal."""
