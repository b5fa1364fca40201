"""Log runs to CSV files and to MLflow.

With MLflow's own settings a server that is away takes minutes. MLflow reads some settings when it is imported.
"""

import os

for _name, _value in {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",  # with open connections, the loss of a removed database goes unnoticed
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}.items():
    os.environ.setdefault(_name, _value)
