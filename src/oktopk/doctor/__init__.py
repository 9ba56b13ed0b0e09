"""`oktopk doctor`: versions, devices and kernels here, whether the kernels compute right, and how fast."""
