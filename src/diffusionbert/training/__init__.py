"""The training loop: it knows the contract of methods, and no concrete one."""
