"""What every room may use: errors, files, records, the CPU, memory; imports nothing of the package."""
