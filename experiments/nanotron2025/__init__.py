"""Experiments of nanotron (Hugging Face's Ultra-Scale Playbook, 2025): the best plans of Llamas on 8 to 512 H100s."""
