"""Recurrent cells in gate arithmetic: finding them, chaining their steps, and ordering their weights as ONNX does."""
