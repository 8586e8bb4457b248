"""Tests of causal_encoder.serve."""
