"""The papers' questions, one a file; `python -m harness list` shows them."""
