"""Shared by all packages: errors, files, records, locks, processes. Imports nothing from the rest of grpo."""
