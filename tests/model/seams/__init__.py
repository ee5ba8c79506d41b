"""kvferry's use of vLLM beside its public API, one file per seam, checked against the installed version.

A failure means that vLLM changed a seam: look first at the file that the test names.
"""
