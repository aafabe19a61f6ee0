"""Translation of PTX blocks to LLVM: 32 lanes of a warp become the 32 elements of an LLVM vector."""
