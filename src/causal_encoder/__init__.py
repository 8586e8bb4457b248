"""Causal transformer encoder: define in PyTorch, export, verify, serve.

The subpackages are imported on their own, so that serving never loads torch:
`causal_encoder.model`, `causal_encoder.export`, `causal_encoder.serve`.
"""

__version__ = "0.1.0"
