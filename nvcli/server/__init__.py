"""`nvcli serve`: the OpenAI-compatible HTTP server. No torch here; the engine is handed in."""
