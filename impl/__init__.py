"""Training of large transformers: one model, a parallel plan that is data, one plan that is executed."""
