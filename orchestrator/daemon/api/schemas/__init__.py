"""JSON schemas of clients, made ready to become grammars. Pure: nothing here compiles or calls a library."""
