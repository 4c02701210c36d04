"""What differs between architectures: one module per family, mixers shared."""
