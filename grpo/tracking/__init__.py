"""A run's log in CSV files, and MLflow.

MLflow's own settings take minutes to fail. No request is repeated: a repeated one would make a second run where only the answer
to the first one was lost. Sending a run's folder again finds that run. MLflow reads some of this when it is imported.
"""

import os

for _name, _value in {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}.items():
    os.environ.setdefault(_name, _value)
