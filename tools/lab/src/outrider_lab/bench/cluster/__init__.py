"""`outrider bench cluster`: plans over hosts, predicted and measured, with hosts that join, leave and are shared."""
