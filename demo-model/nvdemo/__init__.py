"""Everything that makes nvcli's built-in demo model: text, tokenizer, training, evaluation."""
