"""The report: figures, tables and write-up, made from result files only."""
