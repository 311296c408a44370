"""Everything up to a batch: which files, in which order, read how, made into which tensors."""
