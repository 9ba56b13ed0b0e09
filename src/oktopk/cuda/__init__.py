"""The device step: its kernels, CUDA graphs and events."""
