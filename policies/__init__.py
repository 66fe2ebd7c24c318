"""Every decision, without effects: values in, values out. No I/O, clock, random generator, logging or framework."""
