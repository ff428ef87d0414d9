"""isoload.kernels: Triton kernels for the token-parallel stages, each with a torch twin."""
