"""The Bayesian reading of attention: conjugate and rate function, MAP, and the saddle of Γ."""
