"""Other people's engines behind our trainer's interface, to hold ours against: the same model, data and recipe."""
