"""Depth policies side by side: the field's beside this one's, and a replay without noise.

recorded   what was recorded: for each request, what its drafter proposes behind every token, and how much is right
fixed      a fixed depth for all, and one for each request
hill_climber, batch_table   as in onnxruntime-genai and in vLLM
run        plays recorded requests under a policy, on costs that are a function
hindsight  the best fixed depths, by trying all
"""
