"""Quantization: what a float model becomes with 8-bit operands of its products, by data that it is shown.

| file | holds |
|---|---|
| `formats` | the arithmetic of the formats, in NumPy alone |
| `histogram`, `ranges` | what is remembered of a tensor, and the range that is chosen by it |
| `batches`, `calibration` | data in all forms, and the float model run on them |
| `units`, `flow`, `placement` | the products that can be quantized, where 8 bits flow then, and the graph that says so |
| `recurrences` | recurrent operators, whose states no calibration sees |
| `smoothing` | scales moved from activations into weights |
| `quantizer` | all of these together: a float model to quantized ones, by assignments of formats to units |
| `held_out` | which batches calibrate, and which measure |
| `uniform` | `precision="int8"` and `"int8-rows"` of `prefuse.compile` |
"""
