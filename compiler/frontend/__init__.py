"""From what users have (PyTorch modules, exported programs, ONNX in any form) to one dialect of `onnx_ir.Model`."""
