"""The study: params.yaml as typed values, the configuration of each run, what results depend on, and paths of files."""
