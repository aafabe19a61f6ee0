"""What tests share: cases, models of hardware, and how kernels are run in the simulator."""
