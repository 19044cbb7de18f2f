"""Word lists and facts from which the conversations are made."""
