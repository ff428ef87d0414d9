"""isoload inside of SGLang: behind its own options, attached by its plug-in loader. docs/sglang.md describes it.

seams       ../sglang_seams.json: what is replaced, wrapped and read
attach      checks the seams, hooks them
layers      the Balancers of all layers, made once and refreshed in place
dispatch    hooks of --ep-dispatch-algorithm dynamic and lp
waterfill   stands for SGLang's WaterfillBalancer
placement   --eplb-algorithm isoload
self_check  a known batch through every hook
"""

from isoload.integrations.sglang.attach import attach, attach_or_leave
from isoload.integrations.sglang.layers import LAYERS

__all__ = ["LAYERS", "attach", "attach_or_leave"]
