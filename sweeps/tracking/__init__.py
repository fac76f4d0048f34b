"""MLflow: the comparison table in a browser."""
