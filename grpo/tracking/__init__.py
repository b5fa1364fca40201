"""Log runs to CSV files and to MLflow.

With MLflow's own settings a failure takes minutes. Requests are not repeated, as a repeated one would make a second run if only
the answer to the first was lost; the next write finds the run. MLflow reads some settings when it is imported.
"""

import os

for _name, _value in {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",  # so that a database that is removed during a run is missed
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}.items():
    os.environ.setdefault(_name, _value)
