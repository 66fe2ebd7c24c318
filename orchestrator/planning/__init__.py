"""From what is configured, sketched and measured to what the planner chooses from, and back to what is started."""
