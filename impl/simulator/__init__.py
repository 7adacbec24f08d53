"""Predicts time and memory of one training step on a described system, from what the step computes and sends."""
