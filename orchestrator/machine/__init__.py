"""What a host says of itself: its cores, devices, memory, and who takes them."""
