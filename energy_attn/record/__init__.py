"""What energies say while a model runs, out of the transformations that it is made of."""
