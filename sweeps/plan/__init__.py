"""From a point of the space to a plan, or to every reason why it is illegal."""
