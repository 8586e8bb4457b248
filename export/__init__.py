"""Write verified bundles, and verify them again later."""

from causal_encoder.export.onnx import export_onnx
from causal_encoder.export.program import export_program
from causal_encoder.export.torchscript import export_torchscript
from causal_encoder.export.verify import Check, Report, verify

__all__ = ["Check", "Report", "export_onnx", "export_program", "export_torchscript", "verify"]
