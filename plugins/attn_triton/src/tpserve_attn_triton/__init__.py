"""Attention kernels in Triton, for tpserve. Importing this package loads no triton."""
