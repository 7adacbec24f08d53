"""The fastest plan for a model on a system: searched by the simulator, the best ones measured.

May import every room on a lower floor of docs/code.md, up to harness.launch.
"""
