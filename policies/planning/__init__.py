"""What runs where: the values of a plan, the search for the best one, and what is predicted of it."""
