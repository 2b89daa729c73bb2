"""ONNX forms of torch operators that torch's own exporter has none for, or a wrong one."""
