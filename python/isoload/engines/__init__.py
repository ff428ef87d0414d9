"""Plug-ins of isoload for SGLang, vLLM, Megatron-Core and transformers, and the code that they share."""
