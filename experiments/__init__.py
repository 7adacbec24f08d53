"""The papers' questions, one a file; `lmscale list` shows them."""
