"""Computes steps on one rank's device."""
