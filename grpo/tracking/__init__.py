"""A run's log in CSV files, and MLflow."""
