"""What vLLM itself loads by module path.

One file per seam; tests/model/test_vllm_seams.py fails when vLLM changes one.
"""
