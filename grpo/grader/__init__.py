"""Is an answer equal to the truth? And the processes in which that is found out."""
