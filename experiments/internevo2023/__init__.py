"""Experiments of InternEvo (Shanghai AI Laboratory, 2023): a 7B model on 8 to 1,024 A100s."""
