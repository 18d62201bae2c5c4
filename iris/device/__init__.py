"""Building blocks for kernels, with the constants and types that hosts share. Nothing here imports PyTorch."""
