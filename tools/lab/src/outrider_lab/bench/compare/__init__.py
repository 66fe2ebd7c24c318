"""`outrider bench compare`: Outrider beside other engines, on the same prompts, in turns, each in its own process."""
