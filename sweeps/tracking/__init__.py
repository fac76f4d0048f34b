"""Record a study in MLflow, which shows the comparison table in a browser."""
