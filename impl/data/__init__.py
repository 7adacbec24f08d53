"""Token files, the batches cut from them, and a synthetic language whose entropy is known."""
