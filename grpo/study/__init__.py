"""The study: params.yaml as typed values, a run's effective configuration, what results depend on, where files lie."""
