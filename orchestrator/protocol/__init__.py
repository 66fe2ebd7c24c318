"""What crosses a process border: messages, the options that a worker loads by, links between hosts."""
