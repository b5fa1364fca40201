"""What the command line does beyond calling one room."""
