"""One torch thread everywhere: two beside a busy process make small operations slower, not faster."""

import torch

torch.set_num_threads(1)

collect_ignore = ["kernels"]  # they need Triton and its interpreter: make kernels-check
