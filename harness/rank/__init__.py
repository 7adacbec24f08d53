"""One try at a run: its ranks and their supervisor, the files they leave, and the record made of those.

May import impl and harness.records.
"""
