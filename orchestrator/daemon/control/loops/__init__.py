"""What runs beside requests: the plan, loads and profiles are looked at again and again."""
