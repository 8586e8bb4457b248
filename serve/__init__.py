"""Run exported bundles with NumPy and ONNX Runtime alone; torch is never imported."""

from causal_encoder.serve.bundle import Bundle, open_bundle
from causal_encoder.serve.manifest import Manifest
from causal_encoder.serve.placement import Placement
from causal_encoder.serve.session import EncoderSession

__all__ = ["Bundle", "EncoderSession", "Manifest", "Placement", "open_bundle"]
