"""Tests of causal_encoder.model."""
