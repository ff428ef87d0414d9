"""isoload inside of vLLM: behind its expert-parallel load balancer (EPLB), attached as a general plug-in.
docs/vllm.md describes it.

seams       ../vllm_seams.json: what is replaced, wrapped and read
attach      checks the seams, hooks them
layers      the Balancers of all models, made once and refreshed in place
dispatch    hooks of the choice of replicas and of EPLB's state
placement   the policy of rebalances
self_check  a known batch through every hook
"""

from isoload.integrations.vllm.attach import attach, attach_or_leave
from isoload.integrations.vllm.layers import MODELS

__all__ = ["MODELS", "attach", "attach_or_leave"]
