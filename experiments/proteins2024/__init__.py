"""Experiments of Cheng et al. 2024 (2411.02142) and Serrano et al. 2024 (2406.07249) on proteins' best model sizes."""
