"""Records the observables of each energy while a model runs, through JAX's transformations."""
