"""The conversation in a terminal: session, commands, rendering and the prompt loop."""
