"""The engine: bookkeeping that needs no torch, and the device half that does."""
