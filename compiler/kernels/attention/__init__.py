"""What attention families share: sequences over page tables, and softmax in pieces."""
