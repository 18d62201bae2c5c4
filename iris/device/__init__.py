"""Building blocks for kernels. Everything here is ``@triton.jit`` and imports nothing but Triton."""
