"""Layers: the pieces models are made of. They know tensors and `ForwardBatch`, not sequences."""
