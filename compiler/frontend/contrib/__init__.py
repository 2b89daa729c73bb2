"""Operators of ONNX Runtime's domain com.microsoft, in terms of ONNX's own: one file a family, `table.py` lists them."""
