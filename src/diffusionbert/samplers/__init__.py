"""One algorithm a file, all on the contract of `method.Sampler`."""
