"""Attention kernels and ops in Triton, for tpserve."""
