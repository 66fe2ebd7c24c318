"""How a model goes onto a device, decided before anything of it is loaded."""
