"""The constants of a described system, measured on it.

May import every room on a lower floor of docs/code.md, up to harness.doctor.
"""
