"""Everything that touches vLLM: plugin, models, heads, state, sampler, scheduler, runner adapters."""
