"""The kernels run in Triton's interpreter, on CPU tensors; bfloat16 is left to GPUs, for the interpreter's is wrong."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported
