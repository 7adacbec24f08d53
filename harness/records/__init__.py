"""One run's record: written and checked, kept in a store, and what is measured from it.

May import impl.
"""
