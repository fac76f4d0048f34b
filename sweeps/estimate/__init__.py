"""What a plan will need, before it runs: bytes by component, seconds by part, and how sure that is. Pure."""
