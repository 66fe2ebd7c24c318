"""`outrider bench headlines`: the claims of the product's brief beside what this machine gives."""
