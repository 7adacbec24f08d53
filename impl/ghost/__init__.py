"""Ranks of the real engine without other ranks, network or memory: what they would send, in which order, and need."""
