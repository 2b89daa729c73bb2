"""What runs beside the kernels: copies from a program's file, on streams of their own."""
