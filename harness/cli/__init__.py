"""The command line: one function a verb, its options read from the signature.

May import every room.
"""
