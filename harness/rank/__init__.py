"""One attempt at a run: its ranks and their supervisors, the files they leave, and the record made of those.

May import impl and harness.records.
"""
