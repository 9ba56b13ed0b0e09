"""Steps that stay on a GPU: kernels, CUDA graphs, and what is read back."""
