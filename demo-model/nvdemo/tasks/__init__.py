"""One module per family of tasks; each task is a function from a Dice to a Sample."""
