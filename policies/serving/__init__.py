"""What a server decides while it serves: who runs, who waits, where a request goes, what gives way."""
