"""A Triton backend that exists only so that Triton's interpreter may be used where there is no GPU.

vLLM turns Triton off, and with it the V2 runner, unless some driver of Triton says that it is active. Under TRITON_INTERPRET=1
kernels run as Python, so nothing here ever compiles or launches one.
"""
