"""Reading the files of finished runs; statistics, selection, published claims."""
